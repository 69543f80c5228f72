//! Retention under a server: it runs by itself, once for all servers on a store.

use std::time::Duration;

use everbus::duty::Duty;
use everbus::{Bus, Event, Retention};
use everbus_server::{Server, ServerOptions};
use tokio::sync::oneshot;

use crate::api::until;

// conformance: operations/serve-retention: of two servers on one store one runs the daily retention
#[tokio::test(flavor = "multi_thread")]
async fn of_two_servers_one_runs_retention() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", dir.path().join("test.db").display());
    let retention = Retention {
        max_age: Some(Duration::from_millis(1)),
        ..Retention::standard()
    };
    let mut buses = Vec::new();
    for source in ["one", "two"] {
        let builder = Bus::builder()
            .source(source)
            .retention(retention.clone())
            .retention_delay(Duration::from_millis(500));
        buses.push(builder.open(&url).await.unwrap());
    }
    let event = Event::builder("old.news").build().unwrap();
    buses[0].publish(event.clone()).await.unwrap();
    let mut running = Vec::new();
    for bus in &buses {
        let mut options = ServerOptions::default();
        options.listen = "127.0.0.1:0".parse().unwrap();
        let server = Server::bind(bus.clone(), None, options).await.unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let stopped = async move {
            let _ = stopped.await;
        };
        running.push((stop, tokio::spawn(server.run(stopped))));
    }
    let duty = Duty::of(buses[0].engine(), retention.duty(), "").unwrap();
    let state = until("retention", async || {
        duty.state()
            .await
            .unwrap()
            .filter(|state| state.finished_at.is_some())
    })
    .await;
    assert_eq!(state.error, None);
    let found = buses[1].lookup().unwrap().find(event.id()).await.unwrap();
    assert!(found.is_empty(), "{found:?}");
    for (stop, server) in running {
        let _ = stop.send(());
        server.await.unwrap().unwrap();
    }
    // The other server has looked by now or has ended, and left it.
    let bus = Bus::open(&url).await.unwrap();
    let last = Duty::of(bus.engine(), retention.duty(), "")
        .unwrap()
        .state()
        .await
        .unwrap();
    assert_eq!(last.unwrap().turn, state.turn);
}
