//! The campaign for engines with a server, tried on a file: it finds nothing there, and finds a planted bug.

use std::time::Duration;

use everbus_testkit::chaos::plant::AckFirst;
use everbus_testkit::faults::{Place, Plan, Server, Subject, campaign, campaign_with, late_ack};

const SUBJECT: Subject = Subject {
    open: |place| Box::pin(async move { open(&place) }),
    worker: "faults::worker",
};

/// Acks before it handles: a bug that the campaign must find.
const PLANTED: Subject = Subject {
    open: |place| {
        Box::pin(async move {
            let mut engine = open(&place)?;
            engine.broker = AckFirst::wrap(engine.broker);
            Ok(engine)
        })
    },
    worker: "faults::planted_worker",
};

fn open(place: &Place) -> everbus_core::Result<everbus_core::Engine> {
    let file = place.folder.join("faults.db");
    everbus_sqlite::open(&file, everbus_sqlite::Options::default())
}

/// A file has no server to kill.
struct NoServer;

impl Server for NoServer {
    fn ports(&self) -> Vec<u16> {
        Vec::new()
    }

    fn kill(&self) {}

    fn restart(&self) {}

    fn pause(&self) {}

    fn resume(&self) {}
}

#[test]
#[ignore = "a process of a campaign"]
fn worker() {
    SUBJECT.work();
}

#[test]
#[ignore = "a process of a campaign"]
fn planted_worker() {
    PLANTED.work();
}

fn plan(worker_kills: usize, stops: usize) -> Plan {
    Plan {
        server_kills: 0,
        worker_kills,
        cuts: 0,
        pauses: 0,
        pause: Duration::ZERO,
        stops,
    }
}

// conformance: contract/campaign: workers that are killed and stopped past their leases lose nothing
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_and_stopped_workers_lose_nothing() {
    let figures = campaign(&SUBJECT, &NoServer, "", plan(3, 1), crate::seed()).await;
    figures.assert_clean();
    assert!(figures.acknowledged > 0 && figures.handled > 0, "{figures}");
    assert_eq!((figures.worker_kills, figures.stops), (3, 1));
}

// conformance: contract/campaign: the control: a consumer that acks before it handles is found out
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_acks_too_early_is_found_out() {
    // Each kill may hit an event that is acked and not handled; one is enough.
    let short = Duration::from_secs(5);
    for _ in 0..20 {
        let found = campaign_with(&PLANTED, &NoServer, "", plan(5, 0), crate::seed(), short);
        let figures = found.await;
        if !figures.lost.is_empty() {
            return;
        }
    }
    panic!("100 kills, and nothing was found");
}

// conformance: contract/campaign: the late ack of a process that was stopped past its lease is refused
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_ack_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let place = Place {
        url: String::new(),
        folder: folder.path().to_owned(),
    };
    let (said, applied) = late_ack(&SUBJECT, &place).await;
    assert_eq!((said.as_str(), applied), ("REFUSED LeaseLost", true));
}
