//! Ephemeral groups of processes that are killed.

use std::io::Write as _;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use everbus_core::{Code, GroupSpec, Retention, SubscriptionSpec};

use crate::{consume, declare, fetch, open, publish};

const FILE: &str = "EVERBUS_EPHEMERAL_FILE";

fn viewers() -> GroupSpec {
    GroupSpec {
        ephemeral: true,
        subscriptions: vec![SubscriptionSpec {
            name: "all".into(),
            pattern: "*".parse().unwrap(),
        }],
        ..GroupSpec::new("viewers".parse().unwrap())
    }
}

/// The process that is killed: it has an ephemeral group with an event in flight. Does nothing unless it
/// is called by the test below.
#[tokio::test]
async fn victim() {
    let Some(path) = std::env::var_os(FILE) else {
        return;
    };
    let engine = open(Path::new(&path));
    engine.broker.declare(viewers()).await.unwrap();
    publish(&engine, "a.b").await;
    let mut consumer = consume(&engine, "viewers").await;
    fetch(&mut consumer, 1).await;
    writeln!(std::io::stdout(), "in flight").unwrap();
    std::future::pending::<()>().await;
}

fn start_victim(path: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "ephemeral::victim", "--nocapture"])
        .env(FILE, path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let ready = lines.any(|line| line.unwrap().contains("in flight"));
    assert!(ready, "the victim ended early");
    child
}

// conformance: contract/ephemeral-kill: the ephemeral group of a process that was killed is gone, and that of a live one is left alone
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_ephemeral_group_of_a_killed_process_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "billing", "*").await;
    let groups = async || -> Vec<String> {
        let groups = engine.broker.inspect().await.unwrap();
        groups.iter().map(|g| g.name.to_string()).collect()
    };
    let stored = || -> i64 {
        let conn = rusqlite::Connection::open(&path).unwrap();
        conn.query_row("SELECT count(*) FROM groups", [], |r| r.get(0))
            .unwrap()
    };
    for swept_by in ["retention", "a consumer", "its name"] {
        let mut victim = start_victim(&path);
        assert_eq!(groups().await, ["billing", "viewers"]);
        let conflict = engine.broker.declare(viewers()).await.unwrap_err();
        assert_eq!(conflict.code(), Code::GroupConflict, "it is another's");
        victim.kill().unwrap();
        victim.wait().unwrap();
        assert_eq!(
            groups().await,
            ["billing"],
            "at once, before it is swept up"
        );
        match swept_by {
            "retention" => {
                let retention = Retention {
                    max_age: Some(Duration::from_secs(3600)),
                    ..Retention::default()
                };
                let maintenance = engine.maintenance().unwrap();
                maintenance.prune(retention).await.unwrap();
            }
            "a consumer" => {
                let other = open(&path);
                let mut consumer = consume(&other, "billing").await;
                fetch(&mut consumer, 1).await;
                other.broker.close().await.unwrap();
            }
            _ => {
                engine.broker.declare(viewers()).await.unwrap();
                let viewers = "viewers".parse().unwrap();
                engine.broker.remove_group(viewers).await.unwrap();
            }
        }
        assert_eq!(stored(), 1, "swept up by {swept_by}");
    }
    let report = engine.maintenance().unwrap().check().await.unwrap();
    assert!(report.is_ok(), "{report:?}");
}

// conformance: contract/ephemeral-settled: nobody waits for the ephemeral group of another process
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settled_does_not_wait_for_the_ephemeral_group_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let (ours, theirs) = (open(&path), open(&path));
    theirs.broker.declare(viewers()).await.unwrap();
    let published = publish(&ours, "a.b").await;
    let within = Duration::from_secs(60);
    ours.settled()
        .unwrap()
        .settled(published.position, within)
        .await
        .unwrap();
    let brief = Duration::from_millis(50);
    let theirs = theirs.settled().unwrap();
    let waits = theirs.settled(published.position, brief).await;
    assert!(waits.is_err(), "its own group owes it");
}
