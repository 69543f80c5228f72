use everbus::{Context, Envelope, Message, Meta, State, debug_handler};

#[debug_handler]
fn not_async(_event: Envelope) {}

#[debug_handler]
async fn generic<T>(_state: State<T>) {}

#[debug_handler]
async fn hidden(_event: impl Send) {}

#[debug_handler]
async fn too_many(
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

#[debug_handler(loudly)]
async fn with_arguments() {}

#[debug_handler]
struct NoFunction;

impl NoFunction {
    #[debug_handler]
    async fn method(&self, _event: Envelope) {}
}

fn main() {}
