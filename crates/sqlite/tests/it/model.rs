//! Random plans against the model.

use crate::conformance::File;

// conformance: bus/model: random publish, fetch, settle, crash and clock moves agree with a simple model in every step
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_plans_agree_with_the_model() {
    let outcome = everbus_testkit::model::run_seeds(File::new, 1..=40, 250).await;
    assert_eq!(outcome.unwrap().to_string(), "yes");
}
