use everbus::{Payload, Router};

struct Mailer;

struct Underived {
    order_id: u64,
}

async fn confirm(order: Underived) {
    println!("{}", order.order_id);
}

async fn invoice(_order: Payload<Underived>, _mailer: Mailer) {}

fn main() {
    let _ = Router::new()
        .on("orders.order.placed", confirm)
        .on("orders.order.placed", invoice);
}
