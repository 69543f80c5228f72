//! The source of a relay's rows, for the schema of an engine and for users' schemas.

use std::sync::{Arc, Weak};
use std::time::Duration;

use everbus_core::{
    BoxFuture, Claimed, Clock, Code, Error, EventId, FailedRow, Forgotten, LONGEST_RELAY_LEASE,
    OutboxKeep, OutboxRow, OutboxSource, OutboxStatus, RelayLease, Result, RowOutcome,
};
use tokio::sync::Notify;

use super::enqueue::no_table;
use super::{PUBLIC, TABLES, VIEW, dead, forget, rows};
use crate::Postgres;
use crate::config::{Options, Target};
use crate::pool::{Pool, Sql as _, connect, transaction};
use crate::session::Bell;

/// Rows settled in one transaction.
const STEP: usize = 500;
/// Old rows removed in one transaction.
const FORGET: i64 = 500;
/// How often an outbox is looked at where no notification can come: through a pooler without a direct URL.
const OFTEN: Duration = Duration::from_millis(200);
/// The pause before the listener connects again.
const PAUSE: Duration = Duration::from_millis(500);

/// The connections to an outbox.
enum Access {
    /// Those of the engine, if the outbox is in its schema.
    Own(Arc<Postgres>),
    Other(Box<Pool>),
}

/// The outbox of a schema.
struct Source {
    access: Access,
    clock: Arc<dyn Clock>,
    /// The outbox is in the schema of an engine. The dead letters of the engine are there too, and its retention
    /// removes old rows.
    own: bool,
    wake: Arc<Notify>,
    poll: Duration,
    /// The task that wakes the relay.
    listener: Option<tokio::task::AbortHandle>,
}

impl Drop for Source {
    fn drop(&mut self) {
        if let Some(listener) = &self.listener {
            listener.abort();
        }
    }
}

/// The outbox of an opened engine.
pub(crate) fn own_outbox(engine: &Arc<Postgres>) -> Arc<dyn OutboxSource> {
    let wake: Arc<Notify> = Arc::default();
    wake_on_jump(&*engine.clock, &wake);
    let has_session = engine.pool.target().session().is_some();
    let listening = follow(engine.bell.clone(), Arc::downgrade(&wake));
    Arc::new(Source {
        access: Access::Own(engine.clone()),
        clock: engine.clock.clone(),
        own: true,
        wake,
        poll: if has_session {
            engine.options.poll
        } else {
            OFTEN
        },
        listener: Some(tokio::spawn(listening).abort_handle()),
    })
}

/// Wakes the relay whenever the engine is woken. The trigger of the outbox notifies the engine too.
async fn follow(bell: Arc<Bell>, wake: Weak<Notify>) {
    let mut next = Box::pin(bell.here.notified());
    loop {
        next.await;
        // Registered before the relay is woken, so that no later ring is missed.
        next = Box::pin(bell.here.notified());
        match wake.upgrade() {
            Some(wake) => wake.notify_one(),
            None => return,
        }
    }
}

/// Waiting rows may be due once the clock has jumped.
fn wake_on_jump(clock: &dyn Clock, wake: &Arc<Notify>) {
    let wake = Arc::downgrade(wake);
    clock.on_jump(Box::new(move || {
        if let Some(wake) = wake.upgrade() {
            wake.notify_one();
        }
    }));
}

/// The connections to the schema that a URL names, or to `public`.
fn pool_of(url: &str, options: &Options) -> Result<Pool> {
    let mut target = Target::parse(url, options)?;
    if !url.contains("schema=") {
        target.schema = PUBLIC.to_owned();
    }
    // A relay needs few connections.
    target.pool_size = target.pool_size.min(3);
    Ok(Pool::new(target, options.patience))
}

/// Whether a schema has an outbox, and whether it has the tables of an engine.
async fn look(pool: &Pool) -> Result<(bool, bool)> {
    let sql = "SELECT to_regclass($1) IS NOT NULL, to_regclass($2) IS NOT NULL";
    let schema = &pool.target().schema;
    let [outbox, engine] =
        ["event_outbox", "dead_letters"].map(|table| format!("{schema}.{table}"));
    let db = pool.get().await?;
    let row = db
        .one("opening the outbox", sql, &[&outbox, &engine])
        .await?;
    Ok((crate::rows::get(&row, 0)?, crate::rows::get(&row, 1)?))
}

/// Refuses a table of the same name that is no outbox.
async fn check_columns(pool: &Pool) -> Result<()> {
    let needed =
        "SELECT attributes, due, revision, wanted_at, failures FROM everbus.event_outbox LIMIT 0";
    let found = pool
        .get()
        .await?
        .query("opening the outbox", needed, &[])
        .await;
    found.map(drop).map_err(|e| match e.code() {
        Code::Internal => Error::new(
            Code::Unsupported,
            format!("{:?} has an event_outbox of another kind", pool.target()),
        )
        .hint("rename yours first: ALTER TABLE event_outbox RENAME TO …; nothing was changed")
        .caused_by(e),
        _ => e,
    })
}

/// Creates the tables in a user's schema. Returns whether they were missing.
pub(super) async fn init(url: &str, options: Options) -> Result<bool> {
    let pool = pool_of(url, &options)?;
    let (is_there, has_engine) = look(&pool).await?;
    if has_engine {
        return Ok(false);
    }
    if is_there {
        check_columns(&pool).await?;
    }
    // Also if the table exists: an index or a view of it may be missing.
    let doing = "making the tables of the outbox";
    transaction!(pool, doing, |tx| {
        tx.batch(doing, TABLES).await?;
        tx.batch(doing, VIEW).await
    })?;
    Ok(!is_there)
}

/// Opens the outbox of a user's schema.
pub(super) async fn open(url: &str, options: Options) -> Result<Arc<dyn OutboxSource>> {
    let pool = pool_of(url, &options)?;
    // Connects now, so that opening reports a mistake.
    let (is_there, own) = look(&pool).await?;
    if !is_there {
        return Err(no_table());
    }
    check_columns(&pool).await?;
    let target = pool.target().clone();
    let wake: Arc<Notify> = Arc::default();
    wake_on_jump(&*options.clock, &wake);
    let mut session = target.session().cloned();
    if let Some(session) = &mut session {
        session.schema.clone_from(&target.schema);
    }
    let listener = session.map(|session| {
        let listening = listen(session, options.patience, Arc::downgrade(&wake));
        tokio::spawn(listening).abort_handle()
    });
    Ok(Arc::new(Source {
        access: Access::Other(Box::new(pool)),
        clock: options.clock,
        own,
        poll: if listener.is_some() {
            options.poll
        } else {
            OFTEN
        },
        wake,
        listener,
    }))
}

/// Listens for the trigger of the outbox until the source is gone.
async fn listen(target: Target, patience: Duration, wake: Weak<Notify>) {
    loop {
        if let Ok((conn, mut notifications)) = connect(&target, patience).await {
            let channel = format!("LISTEN {}_wake", target.schema);
            if conn.batch("listening", &channel).await.is_ok() {
                loop {
                    // Rows may have come before the connection listened.
                    match wake.upgrade() {
                        Some(wake) => wake.notify_one(),
                        None => return,
                    }
                    if notifications.recv().await.is_none() {
                        break;
                    }
                }
            }
        }
        if wake.strong_count() == 0 {
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

impl Source {
    fn pool(&self) -> &Pool {
        match &self.access {
            Access::Own(engine) => &engine.pool,
            Access::Other(pool) => pool,
        }
    }

    async fn settle_some(
        &self,
        lease: &RelayLease,
        outcomes: &[(OutboxRow, RowOutcome)],
    ) -> Result<()> {
        for step in outcomes.chunks(STEP) {
            let ours: bool = transaction!(self.pool(), "marking rows", |tx| {
                rows::settle(tx, lease, step, self.clock.now(), self.own).await
            })?;
            if !ours {
                let what = "another relay has the lease of this outbox";
                return Err(Error::new(Code::LeaseLost, what).hint(
                    "what was published and not marked is published again, and its id absorbs it",
                ));
            }
        }
        Ok(())
    }

    async fn retry_failed(&self, ids: Option<Vec<String>>) -> Result<u64> {
        let (mut total, mut after) = (0, 0);
        loop {
            let found =
                rows::failed_rows(&*self.pool().get().await?, ids.as_ref(), after, FORGET).await?;
            // Forwards only: a row that fails again during this retry is not retried again.
            let Some((last, _)) = found.last() else {
                return Ok(total);
            };
            after = *last;
            let retried: u64 = transaction!(self.pool(), "retrying failed rows", |tx| {
                rows::retry(tx, &found, self.clock.now()).await
            })?;
            total += retried;
        }
    }

    async fn forget_old(&self, lease: RelayLease, keep: OutboxKeep) -> Result<Forgotten> {
        let mut done = Forgotten::default();
        if self.own {
            return Ok(done);
        }
        let now = self.clock.now();
        let (sent, dead): (u64, forget::DeadGone) =
            transaction!(self.pool(), "forgetting old rows", |tx| {
                if !rows::is_ours(tx, &lease).await? {
                    return Ok((0, forget::DeadGone::default()));
                }
                let sent = match keep.sent {
                    Some(age) => forget::forget_sent(tx, now.minus(age), FORGET).await?,
                    None => 0,
                };
                let dead = match keep.dead_letters {
                    Some(age) => forget::forget_dead(tx, now.minus(age), FORGET).await?,
                    None => forget::DeadGone::default(),
                };
                Ok((sent, dead))
            })?;
        done.rows = sent + dead.rows;
        done.dead_letters = dead.letters;
        done.more = sent.max(dead.letters) >= FORGET.unsigned_abs();
        Ok(done)
    }
}

impl OutboxSource for Source {
    fn name(&self) -> String {
        let target = self.pool().target();
        format!("{target:?} ({})", target.schema)
    }

    fn acquire(
        &self,
        holder: String,
        lease: Duration,
    ) -> BoxFuture<'_, Result<Option<RelayLease>>> {
        Box::pin(async move {
            if lease.is_zero() || lease > LONGEST_RELAY_LEASE {
                let what = format!("a relay cannot hold a lease of {lease:?}");
                return Err(Error::new(Code::InvalidSetting, what)
                    .hint("a lease lasts up to a minute, and is renewed while the relay runs"));
            }
            let now = self.clock.now();
            rows::acquire(&*self.pool().get().await?, &holder, now, now.plus(lease)).await
        })
    }

    fn claim(&self, after: i64, limit: usize) -> BoxFuture<'_, Result<Claimed>> {
        Box::pin(async move {
            rows::claim(&*self.pool().get().await?, self.clock.now(), after, limit).await
        })
    }

    fn settle(
        &self,
        lease: RelayLease,
        outcomes: Vec<(OutboxRow, RowOutcome)>,
    ) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move { self.settle_some(&lease, &outcomes).await })
    }

    fn release(&self, lease: RelayLease) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move { rows::release(&*self.pool().get().await?, &lease).await })
    }

    fn wait(&self, at_most: Duration) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let _ = tokio::time::timeout(at_most.min(self.poll), self.wake.notified()).await;
        })
    }

    fn status(&self) -> BoxFuture<'_, Result<OutboxStatus>> {
        Box::pin(async move { rows::status(&*self.pool().get().await?, self.clock.now()).await })
    }

    fn failed(&self, limit: usize) -> BoxFuture<'_, Result<Vec<FailedRow>>> {
        Box::pin(async move { rows::failed(&*self.pool().get().await?, limit).await })
    }

    fn retry(&self, ids: Option<Vec<String>>) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let retried = self.retry_failed(ids).await;
            self.wake.notify_one();
            retried
        })
    }

    fn dead_letters(&self) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move { dead::count(&*self.pool().get().await?).await })
    }

    fn find_dead_letter(&self, text: String, id: EventId) -> BoxFuture<'_, Result<Option<String>>> {
        Box::pin(async move { dead::find(&*self.pool().get().await?, &text, id).await })
    }

    fn forget(&self, lease: RelayLease, keep: OutboxKeep) -> BoxFuture<'_, Result<Forgotten>> {
        Box::pin(self.forget_old(lease, keep))
    }
}
