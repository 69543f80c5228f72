use everbus::{Envelope, Router};

async fn count(_event: Envelope) -> u64 {
    7
}

async fn fails(_event: Envelope) -> Result<(), u64> {
    Err(7)
}

fn not_async(_event: Envelope) {}

fn main() {
    let _ = Router::new().on("*", count).on("*", fails).on("*", not_async);
}
