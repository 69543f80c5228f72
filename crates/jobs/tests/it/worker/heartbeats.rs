//! Each extension of the lease is a heartbeat, and a lost lease ends the child.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use everbus::core::{BoxFuture, Broker, BrokerLayer, Lease};
use everbus::{Bus, Code, Error};
use everbus_jobs::worker::child::ChildLimits;
use everbus_jobs::worker::{HEARTBEAT, Worker};

use super::{Past, Stage, is_running};

// conformance: workflow/props-task-heartbeat: all its properties, lastActivity as reported by the child
// conformance: workflow/task-lock: heartbeats extend the lock of a task
#[tokio::test]
async fn a_heartbeat_says_that_the_child_lives_and_what_it_does() {
    assert_eq!(HEARTBEAT, Duration::from_secs(20));
    let stage = Stage::new().await;
    let worker = stage.worker(ChildLimits::default());
    stage
        .start(worker.heartbeat(Duration::from_millis(300)))
        .await;
    let id = stage.submit("reports", "{}").await;
    let beats = async || {
        let history = stage.history(&id).await;
        let beats = history
            .into_iter()
            .filter(|past| past.event_type == "Task Heartbeat");
        beats.collect::<Vec<Past>>()
    };
    let told = |past: &Past| past.properties.get("lastActivity").is_some();
    stage
        .until("heartbeats with an activity", async || {
            beats().await.iter().filter(|past| told(past)).count() >= 2
        })
        .await;
    stage.go();
    let events = stage.ended(&id).await;
    let pid = &events[1].properties["processId"];
    let beats = beats().await;
    for (index, beat) in beats.iter().enumerate() {
        let beat = &beat.properties;
        assert_eq!(beat["requestId"], "req-reports");
        assert_eq!(beat["heartbeatNumber"], index + 1);
        assert_eq!(beat["workerId"], "worker-i-001");
        assert_eq!(beat["processId"], *pid);
        assert!(beat["memoryUsage"]["rss"].as_u64().unwrap() > 0);
        assert!(beat["elapsedMs"].is_u64());
    }
    let last = &beats.last().unwrap().properties;
    assert_eq!(last["lastActivity"]["type"], "step_running");
    assert_eq!(last["lastActivity"]["stepName"], "color-tags");
    let now = stage.jobs.now().as_micros() / 1_000_000;
    let at = last["lastActivity"]["timestamp"].as_i64().unwrap();
    assert!((now - 120..=now).contains(&at), "{at} is not in seconds");
    let lock = |past: &Past| past.properties["effectiveUntil"].as_i64().unwrap();
    assert!(lock(beats.last().unwrap()) >= lock(&events[1]));
    assert!(
        beats
            .windows(2)
            .all(|pair| lock(&pair[0]) <= lock(&pair[1]))
    );
    stage.bus.shutdown().await.unwrap();
}

/// Answers that every lease is lost, once it is told to.
struct Losing {
    inner: Arc<dyn Broker>,
    lost: Arc<AtomicBool>,
}

impl BrokerLayer for Losing {
    fn inner(&self) -> &dyn Broker {
        &*self.inner
    }

    fn extend(
        &self,
        leases: Vec<Lease>,
        by: Duration,
    ) -> BoxFuture<'_, everbus::Result<Vec<everbus::Result<()>>>> {
        if !self.lost.load(Ordering::SeqCst) {
            return self.inner.extend(leases, by);
        }
        let lost = |_| Err(Error::new(Code::LeaseLost, "another worker has it"));
        let answers = leases.into_iter().map(lost).collect();
        Box::pin(std::future::ready(Ok(answers)))
    }
}

#[tokio::test]
async fn a_lost_lease_kills_the_child() {
    let under = Bus::open("memory:").await.unwrap();
    let lost = Arc::new(AtomicBool::new(false));
    let mut engine = under.engine().clone();
    engine.broker = Arc::new(Losing {
        inner: engine.broker.clone(),
        lost: lost.clone(),
    });
    let bus = Bus::builder().with_engine(engine).unwrap();
    let stage = Stage::on(bus, Arc::new(tempfile::tempdir().unwrap()));
    let worker = stage.worker(ChildLimits::default());
    stage
        .start(worker.heartbeat(Duration::from_millis(100)))
        .await;
    // It would ignore SIGTERM: a lost lease kills at once.
    let id = stage.submit("stubborn", "{}").await;
    let pid = stage.pid(&id).await;
    assert!(is_running(pid));
    lost.store(true, Ordering::SeqCst);
    stage.gone(pid).await;
    let history = stage.history(&id).await;
    let ends = ["Task Failed", "Task Timeout", "Task Completed"];
    assert!(
        !history
            .iter()
            .any(|past| ends.contains(&past.event_type.as_str()))
    );
    stage
        .bus
        .shutdown_within(Duration::from_secs(1))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_worker_needs_something_to_run_and_a_heartbeat() {
    let stage = Stage::new().await;
    let error = Worker::new(stage.jobs.clone()).mount().await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidSetting);
    let hasty = stage
        .worker(ChildLimits::default())
        .heartbeat(Duration::ZERO);
    assert_eq!(
        hasty.mount().await.unwrap_err().code(),
        Code::InvalidSetting
    );
}
