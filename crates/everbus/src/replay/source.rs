//! Reads the selected events, batch by batch, in the order of the log.

use std::sync::Arc;

use everbus_core::{
    Code, Cursor, Engine, Error, EventId, History, HistoryQuery, Log, Lookup, Pattern, Position,
    Recorded, Result, Shard, StartFrom, Timestamp,
};

use super::selection::{Selection, Wanted};

/// A batch of events, and how far the log was searched for them.
pub(super) struct Batch {
    pub(super) events: Vec<Arc<Recorded>>,
    pub(super) reached: Cursor,
}

/// Where a selection begins and ends in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bounds {
    /// The first event is after this.
    pub(super) from: Cursor,
    /// The last one is at or before this.
    pub(super) upto: Cursor,
}

/// How many events are read at once.
const BATCH: usize = 4096;

/// Reads on from a position.
pub(super) struct Source {
    log: Arc<dyn Log>,
    from: From,
    wanted: Wanted,
    /// Everything up to here was read.
    done: Cursor,
    upto: Cursor,
}

enum From {
    Log(Vec<Pattern>),
    History(Arc<dyn History>, Box<HistoryQuery>),
    One(Arc<dyn Lookup>, EventId, Box<Selection>),
}

/// Finds the current begin and end of a selection. Later events are not part of it: otherwise a replay
/// would read its own copies.
pub(super) async fn bounds(engine: &Engine, selection: &Selection) -> Result<Bounds> {
    let log = engine.log()?;
    if let Some(id) = selection.event {
        let position = only(engine, selection, id).await?.position;
        return Ok(Bounds {
            from: Cursor::before(position),
            upto: position.into(),
        });
    }
    let mut upto = log.head().await?;
    if let Some((name, types)) = selection.stream() {
        let last = log.resolve(StartFrom::Last, vec![types.clone()]).await?;
        // `last` is just before the newest match; without a match it is at the end.
        if last.reaches(&upto) {
            return Err(Error::new(
                Code::NotFound,
                format!("there is no event of the stream {name}"),
            )
            .hint("a stream is named like its events: orders:order-placed, orders.order.placed, orders"));
        }
    }
    if let Some(until) = selection.until {
        let after = Timestamp::from_micros(until.as_micros().saturating_add(1));
        let end = log.resolve(StartFrom::Time(after), Vec::new()).await?;
        upto = upto.earlier(&end);
    }
    let from = match selection.since {
        Some(since) => log.resolve(StartFrom::Time(since), Vec::new()).await?,
        None => Cursor::START,
    };
    Ok(Bounds {
        from: from.earlier(&upto),
        upto,
    })
}

/// The single event with an id.
pub(super) async fn only(
    engine: &Engine,
    selection: &Selection,
    id: EventId,
) -> Result<Arc<Recorded>> {
    let mut found = engine.lookup()?.find(id).await?;
    if let Some(tenant) = &selection.tenant {
        found.retain(|record| record.event.tenant() == Some(tenant));
    }
    match (found.pop(), found.len()) {
        (Some(record), 0) => Ok(record),
        (None, _) => Err(
            Error::new(Code::NotFound, format!("there is no event {id}"))
                .hint("it may never have been published here, or retention has removed it"),
        ),
        (Some(_), others) => Err(Error::new(
            Code::InvalidSetting,
            format!("{} tenants have an event {id}", others + 1),
        )
        .hint("say which tenant's is meant")),
    }
}

impl Source {
    /// Opens the selection within the bounds.
    pub(super) fn open(engine: &Engine, selection: &Selection, bounds: Bounds) -> Result<Self> {
        let unsupported = || Error::new(Code::Unsupported, "this engine has no log to read");
        let log = engine.log.clone().ok_or_else(unsupported)?;
        let from = match (&selection.event, &engine.history) {
            (Some(id), _) => {
                engine.lookup()?;
                let lookup = engine.lookup.clone().ok_or_else(unsupported)?;
                From::One(lookup, *id, Box::new(selection.clone()))
            }
            (None, Some(history)) if selection.has_attributes() => {
                let query = Box::new(selection.query(BATCH));
                From::History(history.clone(), query)
            }
            _ => From::Log(selection.patterns()?),
        };
        Ok(Self {
            log,
            from,
            wanted: Wanted::new(selection),
            done: bounds.from,
            upto: bounds.upto,
        })
    }

    /// The next events; `None` at the end. A batch may be empty without being the last.
    pub(super) async fn next(&mut self) -> Result<Option<Batch>> {
        if self.done.reaches(&self.upto) {
            return Ok(None);
        }
        let (mut events, reached) = match &self.from {
            From::Log(patterns) => {
                let read = self.log.read(self.done.clone(), patterns.clone(), BATCH);
                let (events, reached) = read.await?;
                // No progress: no more events can come, whatever the engine reports.
                let stuck = events.is_empty() && self.done.reaches(&reached);
                (events, if stuck { self.upto.clone() } else { reached })
            }
            From::History(history, query) => {
                let mut page = (**query).clone();
                page.cursor = Some(page.cursor_after(Position::seq(self.done.place(Shard::ONLY))));
                let page = history.query(page).await?;
                let last = page.items.last().map(|record| record.position.into());
                let reached = last.filter(|_| page.next.is_some());
                (page.items, reached.unwrap_or_else(|| self.upto.clone()))
            }
            From::One(lookup, id, selection) => {
                let found = lookup.find(*id).await?;
                let here = found.into_iter().filter(|record| {
                    let tenant = record.event.tenant();
                    selection.tenant.is_none() || selection.tenant.as_deref() == tenant
                });
                (here.collect(), self.upto.clone())
            }
        };
        let (done, upto) = (&self.done, &self.upto);
        // Receive times and positions grow together, so the bounds are enough.
        let within =
            |record: &Recorded| !done.covers(record.position) && upto.covers(record.position);
        let one = matches!(self.from, From::One(..));
        let wanted = &mut self.wanted;
        events.retain(|record| within(record) && (one || wanted.takes(&record.event)));
        self.done = reached.earlier(upto);
        Ok(Some(Batch {
            events,
            reached: self.done.clone(),
        }))
    }
}
