use everbus::{Json, Router};

fn main() {
    // Nothing says what the errors are.
    let _ = Router::new().on("user.created", |Json(id): Json<u64>| async move {
        println!("{id}");
        Ok(())
    });
}
