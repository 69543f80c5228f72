//! The same on PostgreSQL: `cargo test -p everbus-jobs --features postgres --test it postgres`.

use everbus::Bus;
use everbus_jobs::events::{JobCompleted, TaskPending};
use everbus_jobs::{Dispatcher, JobState, Jobs};
use everbus_testkit::servers::Postgres;
use serde_json::json;

use crate::support::{ended, events_of, job, running, task, task_with, until, worker};

// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread")]
async fn jobs_fail_are_resumed_and_complete_with_two_dispatchers() {
    let Some(server) = Postgres::shared() else {
        return;
    };
    let url = server.fresh_database();
    let open = async || Jobs::new(Bus::open(&url).await.unwrap()).unwrap();
    let (one, two) = (open().await, open().await);
    running(&one).await;
    Dispatcher::subscribe(&two).await.unwrap();
    worker(&two).await;
    two.bus().start().await.unwrap();
    let mut tasks = vec![task("d0", &[])];
    for n in 0..8 {
        let from = format!("d{n}");
        tasks.push(task(&format!("l{n}"), &[&from]));
        let fails = json!({ "fail": u8::from(n == 4) });
        tasks.push(task_with(&format!("r{n}"), &[&from], &fails));
        tasks.push(task(
            &format!("d{}", n + 1),
            &[&format!("l{n}"), &format!("r{n}")],
        ));
    }
    let total = tasks.len();
    one.submit_job(job("diamonds", tasks)).await.unwrap();
    assert_eq!(ended(&one, "diamonds").await.state, JobState::Failed);
    assert_eq!(two.resume("diamonds").await.unwrap().started, ["r4"]);
    assert_eq!(ended(&one, "diamonds").await.state, JobState::Completed);
    until("the job is completed", async || {
        events_of::<JobCompleted>(&one).await.len() == 1
    })
    .await;
    assert_eq!(events_of::<TaskPending>(&one).await.len(), total + 1);
    one.bus().shutdown().await.unwrap();
    two.bus().shutdown().await.unwrap();
}
