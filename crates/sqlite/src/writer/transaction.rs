//! One transaction. All queued commands run in it and are answered once it is durable.

use std::time::{Duration, Instant};

use everbus_core::{Code, Error, Result, Settlement, SubscriptionInfo};
use rusqlite::ErrorCode;
use tokio::sync::oneshot;

use super::{MAX_EVENTS, Writer, data_version};
use crate::answers::Published;
use crate::append::{Appender, ROWS};
use crate::declare::{declare, remove_group, retract};
use crate::disk_space::full;
use crate::effect::{defers_constraints, failed_at_commit};
use crate::errors::{from_sqlite, is_busy, is_fatal};
use crate::failpoint;
use crate::queue::{Answer, Command};

/// The comment makes these statements unique. An effect that runs `COMMIT` by mistake must not find this one
/// in the cache of prepared statements, because the guard does not check cached statements.
const BEGIN: &str = "BEGIN IMMEDIATE /* of the writer */";
const COMMIT: &str = "COMMIT /* of the writer */";

/// The result of a command; its sender gets it after the commit.
enum Outcome {
    Nothing,
    Each(Vec<Result<()>>),
    Unit(Result<()>),
    Declared(Result<Vec<SubscriptionInfo>>),
    Job(Result<Answer>),
}

impl Outcome {
    fn answer(self, command: Command) {
        match (command, self) {
            (
                Command::Settle { reply, .. } | Command::Extend { reply, .. },
                Outcome::Each(results),
            ) => drop(reply.send(Ok(results))),
            (Command::Declare { reply, .. }, Outcome::Declared(result)) => {
                drop(reply.send(result));
            }
            (
                Command::Retract { reply, .. }
                | Command::RemoveGroup { reply, .. }
                | Command::Attach { reply, .. }
                | Command::Detach {
                    reply: Some(reply), ..
                },
                Outcome::Unit(result),
            ) => drop(reply.send(result)),
            (Command::Job { failed, .. }, Outcome::Job(result)) => match result {
                Ok(answer) => answer(),
                Err(error) => failed(error),
            },
            _ => {}
        }
    }
}

impl Writer {
    /// Runs all commands in one transaction. If the disk is full, it runs again without the publishes, so
    /// that acks and dead letters get the remaining room.
    pub(super) fn transaction(
        &mut self,
        mut appends: Vec<Command>,
        mut others: Vec<Command>,
    ) -> Result<()> {
        // Effects can roll back the whole transaction, so they run first, before the work of other commands.
        others.sort_by_key(|command| !command.has_effects());
        self.effects.offenders.clear();
        let mut known = 0;
        let mut error = loop {
            let Err(error) = self.attempt(&mut appends, &mut others) else {
                self.keep_room(appends);
                return Ok(());
            };
            if self.effects.offenders.len() == known {
                break error;
            }
            // An effect rolled the transaction back: run again without that effect.
            known = self.effects.offenders.len();
            if let Err(error) = self.undo_changes() {
                appends.into_iter().for_each(|c| c.fail(error.clone()));
                self.refuse(others, &error);
                return Err(error);
            }
        };
        if error.code() == Code::DiskFull && !others.is_empty() {
            self.patience.save_room(&self.tx.conn, true);
            // A job can run only once.
            let jobs = others.extract_if(.., |c| matches!(c, Command::Job { .. }));
            jobs.for_each(|job| job.fail(error.clone()));
            let again = self
                .undo_changes()
                .and_then(|()| self.attempt(&mut Vec::new(), &mut others));
            match again {
                Ok(()) => return Ok(()),
                Err(e) => error = e,
            }
        }
        self.refuse(others, &error);
        Err(error)
    }

    /// Keeps an empty buffer of commands for reuse, unless it is very large.
    fn keep_room(&mut self, commands: Vec<Command>) {
        if commands.is_empty() && commands.capacity() <= MAX_EVENTS {
            self.spare = commands;
        }
    }

    /// Runs each settlement in its own transaction. A file with deferred constraints needs this: they are
    /// checked at the commit, and a violation would fail every command in the transaction.
    pub(super) fn settle_apart(&mut self, others: &mut Vec<Command>) -> Result<()> {
        if !others.iter().any(Command::has_effects) || !defers_constraints(&self.tx)? {
            return Ok(());
        }
        let apart: Vec<Command> = others.extract_if(.., |c| c.has_effects()).collect();
        let mut apart = apart.into_iter();
        while let Some(command) = apart.next() {
            let Command::Settle { settlements, reply } = command else {
                continue;
            };
            let results = settlements.into_iter().map(|s| self.settle_alone(s));
            let results: Result<Vec<Result<()>>> = results.collect();
            let failed = results.as_ref().err().cloned();
            let _ = reply.send(results);
            if let Some(error) = failed {
                apart.for_each(|command| command.fail(error.clone()));
                return Err(error);
            }
        }
        Ok(())
    }

    /// Runs one settlement in its own transaction. The outer error is fatal for the engine.
    fn settle_alone(&mut self, settlement: Settlement) -> Result<Result<()>> {
        let (reply, mut answer) = oneshot::channel();
        let settlements = vec![settlement];
        self.effects.apart = true;
        let done = self.transaction(Vec::new(), vec![Command::Settle { settlements, reply }]);
        self.effects.apart = false;
        match done {
            Ok(()) => {
                self.deliveries.consumers.hand_over();
                let answer = answer.try_recv().ok().and_then(|all| all.ok()?.pop());
                Ok(answer.unwrap_or_else(|| Err(Error::new(Code::Internal, "no answer"))))
            }
            Err(error) if is_fatal(&error) => Err(error),
            Err(error) => {
                // If this fails, the next transaction repeats it first.
                let _ = self.undo_changes();
                Ok(Err(if is_constraint(&error) {
                    failed_at_commit(error)
                } else {
                    error
                }))
            }
        }
    }

    /// Answers commands whose transaction failed. Commands without an answer, and commands that must happen
    /// (a consumer leaves or changes its handlers), are tried again.
    pub(super) fn refuse(&mut self, commands: Vec<Command>, error: &Error) {
        let lasting = is_fatal(error) || self.queue.is_closed();
        let mut again = Vec::new();
        for command in commands {
            match command {
                Command::Detach { .. } | Command::SetHandled { .. } if !lasting => {
                    again.push(command);
                }
                command => command.fail(error.clone()),
            }
        }
        if !again.is_empty() {
            // These commands run first, after a pause that gives a temporary obstacle time to end.
            again.append(&mut self.backlog);
            self.backlog = again;
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Runs one transaction. On success every command is answered. On failure only the publishes are, unless
    /// an effect rolled the transaction back before anything was published.
    fn attempt(&mut self, appends: &mut Vec<Command>, others: &mut Vec<Command>) -> Result<()> {
        if let Err(error) = self.begin() {
            appends.drain(..).for_each(|c| c.fail(error.clone()));
            return Err(error);
        }
        let offenders = self.effects.offenders.len();
        let mut published = std::mem::take(&mut self.published);
        let result = match self.perform(others) {
            Ok(outcomes) => self
                .append(appends, &mut published)
                .and_then(|()| self.pump_unless_lazy())
                .and_then(|()| self.flush())
                .and_then(|()| self.commit())
                .map(|()| outcomes),
            Err(error) => {
                if self.effects.offenders.len() == offenders {
                    appends.drain(..).for_each(|c| c.fail(error.clone()));
                }
                Err(error)
            }
        };
        match result {
            Ok(outcomes) => {
                self.answers.put(&mut published);
                self.published = published;
                for (command, outcome) in others.drain(..).zip(outcomes) {
                    outcome.answer(command);
                }
                failpoint::hit("after-answer");
                self.announce_head();
                Ok(())
            }
            Err(error) => {
                let _ = self.tx.conn.execute_batch("ROLLBACK");
                let error = match error.code() {
                    Code::DiskFull => full(error.message()),
                    _ if is_fatal(&error) => error.with_unknown_outcome(),
                    _ => error,
                };
                published.drain(..).for_each(|p| p.fail(error.clone()));
                self.published = published;
                Err(error)
            }
        }
    }

    /// A delivery must be durable before a consumer gets it, so nothing is handed out in a lazy transaction.
    fn pump_unless_lazy(&mut self) -> Result<()> {
        if self.patience.is_lazy() {
            return Ok(());
        }
        self.deliveries.pump(&mut self.tx)
    }

    pub(super) fn begin(&mut self) -> Result<()> {
        if self.must_reload {
            self.undo_changes()?;
        }
        let give_up = Instant::now() + self.busy_timeout;
        loop {
            match self.run_prepared(BEGIN) {
                Ok(()) => break,
                Err(e) if is_busy(&e) && Instant::now() < give_up => {}
                Err(e) => return Err(from_sqlite("waiting for the file", e)),
            }
        }
        let version = match data_version(&self.tx.conn) {
            Ok(version) => version,
            Err(e) => {
                let _ = self.tx.conn.execute_batch("ROLLBACK");
                return Err(e);
            }
        };
        if version != self.data_version {
            self.tx.watches.recheck_all();
            if let Err(e) = self.refresh() {
                let _ = self.tx.conn.execute_batch("ROLLBACK");
                return Err(e);
            }
            self.data_version = version;
        }
        Ok(())
    }

    fn append(&mut self, appends: &mut Vec<Command>, published: &mut Vec<Published>) -> Result<()> {
        if appends.is_empty() {
            return Ok(());
        }
        let now = self.tx.clock.now();
        let mut appender = match Appender::new(&self.tx.conn, &self.tx.log, now) {
            Ok(appender) => appender,
            Err(error) => {
                let refused = appends
                    .drain(..)
                    .filter_map(|c| Published::refused(c, &error));
                published.extend(refused);
                return Err(error);
            }
        };
        let mut failure = None;
        let mut commands = appends.drain(..);
        while !commands.as_slice().is_empty() {
            // Publishers of single events share a statement.
            let types = match commands.as_slice().first_chunk::<ROWS>() {
                Some(rows) if failure.is_none() && rows.iter().all(|c| c.single().is_some()) => {
                    let events = rows.iter().filter_map(Command::single);
                    appender.write_rows(&mut self.tx.log, events)
                }
                _ => Ok(None),
            };
            let types = types.unwrap_or_else(|error| {
                failure = Some(error);
                None
            });
            for (row, command) in commands.by_ref().take(ROWS).enumerate() {
                let state = &mut self.tx.log;
                let done = match (command, &failure) {
                    (command, Some(error)) => Published::refused(command, error),
                    (Command::AppendOne { record, reply }, None) => {
                        let result = match types {
                            Some(types) => Ok(appender.written(state, record, types[row])),
                            None => appender.single(state, record),
                        };
                        Some(Published::One(reply, result))
                    }
                    (Command::Append { events, reply }, None) => {
                        let result = appender.answered(state, events);
                        Some(Published::Batch(reply, result))
                    }
                    _ => None,
                };
                let error = done.as_ref().and_then(Published::error);
                let lasting =
                    |e: &&Error| !matches!(e.code(), Code::IdReused | Code::InvalidAttribute);
                failure = failure.or_else(|| error.filter(lasting).cloned());
                published.extend(done);
            }
        }
        failure.map_or(Ok(()), Err)
    }

    fn perform(&mut self, commands: &mut [Command]) -> Result<Vec<Outcome>> {
        commands
            .iter_mut()
            .map(|command| self.perform_one(command))
            .collect()
    }

    fn perform_one(&mut self, command: &mut Command) -> Result<Outcome> {
        Ok(match command {
            Command::Append { .. } | Command::AppendOne { .. } => Outcome::Nothing,
            Command::Settle { settlements, .. } => Outcome::Each(self.deliveries.settle(
                &mut self.tx,
                &mut self.effects,
                settlements,
            )?),
            Command::Extend { leases, by, .. } => {
                Outcome::Each(self.deliveries.leases.extend(&mut self.tx, leases, *by)?)
            }
            Command::Declare { group, .. } => Outcome::Declared(soft(declare(
                &mut self.tx,
                &mut self.deliveries.leases,
                group,
            ))?),
            Command::Retract { subscription, .. } => {
                Outcome::Unit(soft(retract(&mut self.tx, subscription))?)
            }
            Command::RemoveGroup { group, .. } => Outcome::Unit(soft(remove_group(
                &mut self.tx,
                &mut self.deliveries.leases,
                group,
            ))?),
            Command::Attach { session, .. } => {
                Outcome::Unit(match self.deliveries.attach(&mut self.tx, session) {
                    // The lock file cannot be created: only this consumer fails.
                    Err(e) if matches!(e.code(), Code::ReadOnly | Code::OutOfResources) => Err(e),
                    other => soft(other)?,
                })
            }
            Command::SetHandled { session, handled } => {
                if let Some(session) = self.deliveries.consumers.sessions.get_mut(session) {
                    session.set_handled(handled.clone());
                }
                Outcome::Nothing
            }
            Command::Detach { session, .. } => {
                self.deliveries.detach(&mut self.tx, *session)?;
                Outcome::Unit(Ok(()))
            }
            Command::Fed(fed) => {
                self.deliveries.take_feed(&mut self.tx, fed)?;
                Outcome::Nothing
            }
            Command::Watch { position, reply } => {
                if let Some(reply) = reply.take() {
                    self.tx.watches.add(*position, reply);
                }
                Outcome::Nothing
            }
            Command::Job { job, .. } => match job.take() {
                Some(job) => Outcome::Job(soft(job(self))?),
                None => Outcome::Nothing,
            },
        })
    }

    /// Runs a statement that is prepared only once.
    fn run_prepared(&self, sql: &str) -> rusqlite::Result<()> {
        self.tx.conn.prepare_cached(sql)?.execute([]).map(drop)
    }

    pub(super) fn commit(&mut self) -> Result<()> {
        failpoint::hit("before-commit");
        self.run_prepared(COMMIT)
            .map_err(|e| from_sqlite("committing", e))?;
        failpoint::hit("after-commit");
        self.presence.check()?;
        let passed = self.deliveries.passed_by_all(&self.tx);
        self.tx.log.committed(passed);
        self.deliveries.keep_changes();
        Ok(())
    }
}

/// Separates refusals (of this command alone) from failures (of the whole transaction).
fn soft<T>(result: Result<T>) -> Result<Result<T>> {
    match result {
        Err(e)
            if matches!(
                e.code(),
                Code::GroupConflict
                    | Code::GroupNotFound
                    | Code::SubscriptionNotFound
                    | Code::NotFound
                    | Code::InvalidSetting
            ) =>
        {
            Ok(Err(e))
        }
        Err(e) => Err(e),
        Ok(value) => Ok(Ok(value)),
    }
}

fn is_constraint(error: &Error) -> bool {
    let cause = std::error::Error::source(error);
    let cause = cause.and_then(|e| e.downcast_ref::<rusqlite::Error>());
    cause.and_then(rusqlite::Error::sqlite_error_code) == Some(ErrorCode::ConstraintViolation)
}
