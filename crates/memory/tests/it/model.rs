//! Random plans against the model.

use crate::conformance::InMemory;

// conformance: bus/model: random publish, fetch, settle and clock moves agree with a simple model in every step
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_plans_agree_with_the_model() {
    let outcome = everbus_testkit::model::run_seeds(|| InMemory, 1..=30, 300).await;
    assert_eq!(outcome.unwrap().to_string(), "yes");
}
