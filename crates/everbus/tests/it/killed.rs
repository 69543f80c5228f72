//! What a killed process leaves to the next: attempts of the handlers that ran, and of no others.
//!
//! A copy of the file is what a kill leaves: everything that was committed, and an owner whose lock no process
//! holds.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use everbus::{Bus, FailureKind, Message, RetryPolicy, handled};
use tokio::sync::Semaphore;

use crate::support::{PATIENCE, eventually};

const MANY: u64 = 200;

/// Which events were handled, with the attempt that did it.
type Handled = Arc<Mutex<Vec<(u64, u32)>>>;

/// A process whose one handler hangs at an event, as one that is about to kill it.
struct Process {
    bus: Bus,
    handled: Handled,
    /// How often the handler ran for the event.
    runs: Arc<AtomicU32>,
    hangs: Arc<Semaphore>,
}

impl Process {
    async fn start(file: &Path, hangs_at: u64, policy: RetryPolicy, runs: Arc<AtomicU32>) -> Self {
        let url = format!("sqlite:{}", file.display());
        let bus = Bus::builder().retry(policy).open(url).await.unwrap();
        let (all, hangs) = (Handled::default(), Arc::new(Semaphore::new(0)));
        let (seen, begun, counted) = (all.clone(), hangs.clone(), runs.clone());
        bus.subscribe("a")
            .concurrency(1)
            .handler(move |message: Message| {
                let (seen, begun, counted) = (seen.clone(), begun.clone(), counted.clone());
                async move {
                    let number: u64 = serde_json::from_slice(message.event().payload())?;
                    if number == hangs_at {
                        counted.fetch_add(1, Ordering::SeqCst);
                        begun.add_permits(1);
                        std::future::pending::<()>().await;
                    }
                    seen.lock().unwrap().push((number, message.attempt()));
                    handled()
                }
            })
            .await
            .unwrap();
        Self {
            bus,
            handled: all,
            runs,
            hangs,
        }
    }

    /// Waits until the handler hangs; false if the event is given up instead.
    async fn hangs(&self) -> bool {
        let dies = async {
            while self.bus.dead_letters().list().await.unwrap().is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let either = async {
            tokio::select! {
                _ = self.hangs.acquire() => true,
                () = dies => false,
            }
        };
        tokio::time::timeout(PATIENCE, either)
            .await
            .expect("in time")
    }

    /// Leaves the file as a kill would, and goes.
    async fn kill(self, file: &Path, copy: &Path) {
        let conn = rusqlite::Connection::open(file).unwrap();
        let target = copy.to_str().unwrap();
        conn.execute("VACUUM INTO ?1", [target]).unwrap();
        self.bus.shutdown_within(Duration::ZERO).await.unwrap();
    }

    async fn handled(&self, count: u64) -> Vec<(u64, u32)> {
        eventually("all others are handled", || async {
            self.handled.lock().unwrap().len() as u64 == count
        })
        .await;
        let mut handled = self.handled.lock().unwrap().clone();
        handled.sort_unstable();
        handled
    }
}

// conformance: operations/attempts-begun: with one handler at a time and no retries, a kill costs the event that ran its one attempt and the prefetched ones nothing
#[tokio::test]
async fn a_kill_costs_only_the_event_that_ran_its_attempt() {
    let dir = tempfile::tempdir().unwrap();
    let (file, copy) = (dir.path().join("a.db"), dir.path().join("b.db"));
    let runs = Arc::new(AtomicU32::new(0));
    let first = Process::start(&file, 0, RetryPolicy::never(), runs.clone()).await;
    let events = (0..MANY).map(|number| ("a", number));
    first.bus.publish_batch(events).await.unwrap();
    first.bus.start().await.unwrap();
    assert!(first.hangs().await);
    eventually("all are claimed", || async {
        first.bus.groups().await.unwrap()[0].in_flight == MANY
    })
    .await;
    first.kill(&file, &copy).await;

    let next = Process::start(&copy, 0, RetryPolicy::never(), runs).await;
    next.bus.start().await.unwrap();
    let others: Vec<(u64, u32)> = (1..MANY).map(|number| (number, 1)).collect();
    assert_eq!(next.handled(MANY - 1).await, others);
    assert!(!next.hangs().await, "its one attempt is used up");
    assert_eq!(next.runs.load(Ordering::SeqCst), 1);
    let letters = next.bus.dead_letters().list().await.unwrap();
    assert_eq!(letters.len(), 1);
    assert_eq!(letters[0].attempts, 1);
    let kinds: Vec<FailureKind> = letters[0].failures.iter().map(|f| f.kind).collect();
    assert_eq!(kinds, [FailureKind::Crash]);
    next.bus.shutdown().await.unwrap();
}

// conformance: operations/attempts-poison: an event that kills its process is given up, each run counted, and the others are handled
#[tokio::test]
async fn an_event_that_kills_its_process_is_given_up_and_each_run_counted() {
    const POISON: u64 = 3;
    let dir = tempfile::tempdir().unwrap();
    let policy = || RetryPolicy::default().max_retries(2);
    let runs = Arc::new(AtomicU32::new(0));
    let mut file = dir.path().join("0.db");
    let mut handled = Vec::new();
    for generation in 1..=12 {
        let process = Process::start(&file, POISON, policy(), runs.clone()).await;
        if generation == 1 {
            let events = (0..MANY).map(|number| ("a", number));
            process.bus.publish_batch(events).await.unwrap();
        }
        process.bus.start().await.unwrap();
        if process.hangs().await {
            let copy = dir.path().join(format!("{generation}.db"));
            handled.extend(process.handled.lock().unwrap().clone());
            process.kill(&file, &copy).await;
            file = copy;
            continue;
        }
        eventually("the others are settled", || async {
            let groups = process.bus.groups().await.unwrap();
            groups[0].behind + groups[0].in_flight + groups[0].waiting == 0
        })
        .await;
        handled.extend(process.handled.lock().unwrap().clone());
        let letters = process.bus.dead_letters().list().await.unwrap();
        assert_eq!(letters.len(), 1);
        assert_eq!(letters[0].event().payload(), POISON.to_string().as_bytes());
        assert_eq!(letters[0].attempts, runs.load(Ordering::SeqCst));
        assert!(letters[0].attempts >= 3, "its policy allows as many");
        let mut others: Vec<u64> = handled.iter().map(|(number, _)| *number).collect();
        others.sort_unstable();
        others.dedup();
        let expected: Vec<u64> = (0..MANY).filter(|number| *number != POISON).collect();
        assert_eq!(others, expected);
        process.bus.shutdown().await.unwrap();
        return;
    }
    panic!("it kills its process again and again");
}
