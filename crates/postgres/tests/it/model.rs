//! Random plans against the model.

use crate::conformance::Schema;

// conformance: engines/postgres-model: random publish, fetch, settle, crash and clock moves agree with a simple model in every step
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_plans_agree_with_the_model() {
    if !everbus_testkit::conformance::is_available(&Schema::new()) {
        return;
    }
    let outcome = everbus_testkit::model::run_seeds(Schema::new, 1..=6, 200).await;
    assert_eq!(outcome.unwrap().to_string(), "yes");
}
