//! The engine behind PgBouncer in transaction mode.

use std::sync::Arc;

use everbus_core::{Clock, Code, Engine, SystemClock};
use everbus_testkit::conformance::{Harness, Outcome};
use everbus_testkit::conformance::{
    appending, consuming, dead_letters, effects, groups, inbox, ordered, restart, settling, upkeep,
};
use everbus_testkit::servers::{PgBouncer, Postgres};

use crate::support::{group, options};

/// A database that is reached through the pooler only.
struct Pooled(String);

impl Harness for Pooled {
    async fn open(&self, clock: Arc<dyn Clock>) -> Engine {
        everbus_postgres::open(&self.0, options(clock))
            .await
            .unwrap()
    }

    fn survives_restart(&self) -> bool {
        true
    }
}

fn is_well(outcome: Outcome) {
    assert_eq!(outcome.unwrap().to_string(), "yes");
}

fn pooled(url: &str) -> String {
    let join = if url.contains('?') { '&' } else { '?' };
    format!("{url}{join}pooler=transaction&pool_size=5")
}

// conformance: engines/postgres-pooler: publishing, consuming, retries, dead letters, inbox and effects work through a pooler in transaction mode
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_but_sessions_works_through_a_pooler() {
    let Some(server) = Postgres::shared() else {
        return;
    };
    let Some(pooler) = PgBouncer::start(server) else {
        return;
    };
    let fresh = || Pooled(pooled(&pooler.through(&server.fresh_database())));
    is_well(consuming::events_come_in_the_order_of_the_log(fresh()).await);
    is_well(consuming::competing_consumers_share_and_never_double(fresh()).await);
    is_well(consuming::dropping_a_fetch_loses_nothing(fresh()).await);
    is_well(settling::a_failed_event_waits_out_its_delay(fresh()).await);
    is_well(settling::a_late_settlement_is_refused(fresh()).await);
    is_well(settling::follow_ups_go_with_a_failure(fresh()).await);
    is_well(ordered::random_work_keeps_every_key_in_order(fresh()).await);
    is_well(appending::a_batch_is_stored_whole_or_not_at_all(fresh()).await);
    is_well(appending::odd_payloads_come_out_as_they_went_in(fresh()).await);
    is_well(groups::widening_is_not_retroactive(fresh()).await);
    is_well(dead_letters::filters_select(fresh()).await);
    is_well(inbox::what_was_handled_has_no_effect_again(fresh()).await);
    is_well(effects::an_effect_that_fails_undoes_its_settlement(fresh()).await);
    is_well(restart::a_restart_keeps_everything(fresh()).await);
    is_well(upkeep::every_event_has_one_state_per_group(fresh()).await);
}

// conformance: engines/postgres-pooler-session: an ephemeral group needs a session, which a direct URL gives
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_needs_a_session_needs_a_direct_url() {
    let Some(server) = Postgres::shared() else {
        return;
    };
    let Some(pooler) = PgBouncer::start(server) else {
        return;
    };
    let direct = server.fresh_database();
    let url = pooled(&pooler.through(&direct));
    let mut ephemeral = group("dashboard");
    ephemeral.ephemeral = true;
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let engine = everbus_postgres::open(&url, options(clock.clone()))
        .await
        .unwrap();
    let refused = engine.broker.declare(ephemeral.clone()).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unsupported);
    assert!(refused.hint_text().unwrap().contains("direct_url"));
    engine.broker.close().await.unwrap();
    let encoded = direct
        .replace(':', "%3A")
        .replace('/', "%2F")
        .replace('?', "%3F")
        .replace('&', "%26");
    let url = format!("{url}&direct_url={encoded}");
    let engine = everbus_postgres::open(&url, options(clock)).await.unwrap();
    engine.broker.declare(ephemeral).await.unwrap();
    assert_eq!(engine.broker.inspect().await.unwrap().len(), 1);
    engine.broker.close().await.unwrap();
}
