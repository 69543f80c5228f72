use everbus::{Context, Envelope, Message, Meta, Router};

type Nine = (Meta, Meta);

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

async fn pair(_: Nine) {}

fn main() {
    let _ = Router::new().on("*", all).on("*", pair);
}
