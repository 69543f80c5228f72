use everbus::{Context, Envelope, Message, Meta, Router};

async fn all(
    _: Envelope,
    _: Context,
    _: Message,
    _: Meta,
    _: Envelope,
    _: Context,
    _: Message,
    _: Meta,
    _: Envelope,
) {
}

fn main() {
    let _ = Router::new().on("*", all);
}
