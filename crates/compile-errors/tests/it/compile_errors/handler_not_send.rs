use std::rc::Rc;

use everbus::{Envelope, Router};

async fn keeps(_event: Envelope) {
    let count = Rc::new(1);
    std::future::ready(()).await;
    println!("{count}");
}

fn main() {
    let _ = Router::new().on("*", keeps);
}
