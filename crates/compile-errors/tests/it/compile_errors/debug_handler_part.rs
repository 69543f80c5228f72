use std::rc::Rc;

use everbus::{Context, Envelope, Payload, State, debug_handler};

struct Mailer;

struct Underived {
    order_id: u64,
}

#[debug_handler]
async fn plain_payload(_context: Context, order: Underived) {
    println!("{}", order.order_id);
}

#[debug_handler]
async fn underived(_order: Payload<Underived>, _context: Context) {}

#[debug_handler]
async fn state_without_clone(State(_mailer): State<Mailer>) {}

#[debug_handler]
async fn borrowed(_name: &str) {}

#[debug_handler]
async fn count(_event: Envelope) -> u64 {
    7
}

#[debug_handler]
async fn fails(_event: Envelope) -> Result<(), u64> {
    Err(7)
}

#[debug_handler]
async fn keeps(_event: Envelope) {
    let count = Rc::new(1);
    std::future::ready(()).await;
    println!("{count}");
}

fn main() {}
