//! Follows the log: first everything after a cursor, then events as they are stored, without a gap between.
//!
//! One task per server reads the end of the log for all followers and serialises each event once. A follower that
//! begins earlier, or that falls behind, reads the log itself until it has caught up.

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use everbus::{Bus, Code, Cursor, Error, Pattern, Recorded, Result, StartFrom};
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::sync::{Mutex, broadcast};

/// Batches that a follower may fall behind before it reads the log itself.
const BUFFER: usize = 512;
/// Events of one batch: followers are woken once for all of them.
const LIVE: usize = 64;
/// Events that are read or passed on at once.
const BATCH: usize = 256;
/// The reader of the end of the log stops this long after its last follower.
const LINGER: Duration = Duration::from_secs(5);
/// After an error of the engine the reader waits this long.
const AFTER_ERROR: Duration = Duration::from_millis(500);

/// An event and its JSON, which is made once for all followers.
pub(crate) struct Live {
    pub(crate) record: Arc<Recorded>,
    json: OnceLock<Arc<str>>,
}

impl Live {
    pub(crate) fn new(record: Arc<Recorded>) -> Self {
        Self {
            record,
            json: OnceLock::new(),
        }
    }

    /// The native JSON envelope.
    pub(crate) fn json(&self) -> Arc<str> {
        let make = || match serde_json::to_string(&*self.record) {
            Ok(json) => json.into(),
            // Texts, numbers and checked JSON: this cannot fail.
            Err(_) => "null".into(),
        };
        self.json.get_or_init(make).clone()
    }
}

type Sender = broadcast::Sender<Arc<[Arc<Live>]>>;
type Receiver = broadcast::Receiver<Arc<[Arc<Live>]>>;

/// The end of the log, shared by all followers of a server.
pub(crate) struct Hub {
    bus: Bus,
    reading: Mutex<Option<Sender>>,
}

impl Hub {
    pub(crate) fn new(bus: Bus) -> Arc<Self> {
        Arc::new(Self {
            bus,
            reading: Mutex::new(None),
        })
    }

    /// Follows the log from a cursor.
    pub(crate) async fn follow(
        self: &Arc<Self>,
        patterns: Vec<Pattern>,
        tenant: Option<String>,
        from: Begin,
    ) -> Result<Follow> {
        // First, so that no event is stored between the end of catching up and the first live one.
        let live = self.subscribe().await?;
        let log = self.bus.log()?;
        let cursor = match from {
            Begin::After(cursor) => cursor,
            Begin::At(start) => log.resolve(start, patterns.clone()).await?,
        };
        Ok(Follow {
            hub: self.clone(),
            patterns,
            tenant,
            cursor,
            live,
            behind: true,
        })
    }

    /// Events from now on. The position of the reader is known when this returns.
    async fn subscribe(self: &Arc<Self>) -> Result<Receiver> {
        let mut reading = self.reading.lock().await;
        if let Some(sender) = &*reading {
            return Ok(sender.subscribe());
        }
        let head = self.bus.log()?.head().await?;
        let (sender, receiver) = broadcast::channel(BUFFER);
        *reading = Some(sender.clone());
        tokio::spawn(read_end(Arc::downgrade(self), sender, head));
        Ok(receiver)
    }

    /// Ends the reader if it has no followers. Under the lock of `subscribe`, so that none is missed.
    async fn is_over(&self, sender: &Sender) -> bool {
        let mut reading = self.reading.lock().await;
        let over = sender.receiver_count() == 0;
        if over {
            *reading = None;
        }
        over
    }
}

/// Reads the end of the log until there are no followers.
async fn read_end(hub: Weak<Hub>, sender: Sender, mut cursor: Cursor) {
    let everything = everything();
    loop {
        let Some(hub) = hub.upgrade() else {
            return;
        };
        let read = async {
            let log = hub.bus.log()?;
            let (events, next) = log.read(cursor.clone(), everything.clone(), LIVE).await?;
            if events.is_empty() && next == cursor {
                let _ = tokio::time::timeout(LINGER, log.wait_beyond(cursor.clone())).await;
            }
            Ok::<_, Error>((events, next))
        };
        match read.await {
            Ok((events, next)) => {
                cursor = next;
                let mut batch = Vec::with_capacity(events.len());
                for record in events {
                    batch.push(Arc::new(Live::new(whole(&hub.bus, record).await)));
                }
                if !batch.is_empty() {
                    // Without followers there is no receiver; that is looked at below.
                    let _ = sender.send(batch.into());
                }
            }
            Err(error) if error.code() == Code::EventBusShutdownError => {
                *hub.reading.lock().await = None;
                return;
            }
            Err(error) => {
                tracing::debug!(target: "everbus::ws", %error, "the end of the log cannot be read");
                tokio::time::sleep(AFTER_ERROR).await;
            }
        }
        if sender.receiver_count() == 0 && hub.is_over(&sender).await {
            return;
        }
    }
}

/// Every event: a lone `*` leaves out those of the bus itself.
fn everything() -> Vec<Pattern> {
    ["*", "system.>"]
        .iter()
        .filter_map(|pattern| pattern.parse().ok())
        .collect()
}

/// The complete event; one whose large part cannot be had is shown as it is in the log.
async fn whole(bus: &Bus, record: Arc<Recorded>) -> Arc<Recorded> {
    if record.event.overflow().is_none() {
        return record;
    }
    bus.whole(&record).await.unwrap_or(record)
}

/// Where a follower begins.
#[derive(Clone, Debug)]
pub(crate) enum Begin {
    /// After this cursor: it had everything up to it.
    After(Cursor),
    /// At the end, the beginning, the last event or a time.
    At(StartFrom),
}

impl Begin {
    /// Reads `new`, `first`, `last` or a time.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let start = match text {
            "new" => StartFrom::New,
            "first" => StartFrom::First,
            "last" => StartFrom::Last,
            time => StartFrom::Time(time.parse()?),
        };
        Ok(Self::At(start))
    }
}

/// An event that a follower gets, and the cursor after it.
pub(crate) struct Followed {
    pub(crate) event: Arc<Live>,
    pub(crate) cursor: Cursor,
}

/// One reader of the log.
pub(crate) struct Follow {
    hub: Arc<Hub>,
    patterns: Vec<Pattern>,
    tenant: Option<String>,
    cursor: Cursor,
    live: Receiver,
    /// Whether the log itself has to be read.
    behind: bool,
}

impl Follow {
    /// Everything up to here was returned, or does not match.
    pub(crate) fn cursor(&self) -> &Cursor {
        &self.cursor
    }

    /// Whether the log itself is being read: the follower sets the pace, and nothing is lost if it waits.
    pub(crate) fn is_behind(&self) -> bool {
        self.behind
    }

    /// Waits for the next matching events. Dropping the future loses nothing.
    pub(crate) async fn next(&mut self) -> Result<Vec<Followed>> {
        loop {
            let events = if self.behind {
                self.catch_up().await?
            } else {
                self.receive().await?
            };
            if !events.is_empty() {
                return Ok(events);
            }
        }
    }

    async fn catch_up(&mut self) -> Result<Vec<Followed>> {
        let log = self.hub.bus.log()?;
        let (events, next) = log
            .read(self.cursor.clone(), self.patterns.clone(), BATCH)
            .await?;
        let mut matching = Vec::with_capacity(events.len());
        let mut cursor = self.cursor.clone();
        for record in &events {
            cursor.advance(record.position);
            if self.sees(record) {
                let record = whole(&self.hub.bus, record.clone()).await;
                matching.push(Followed {
                    event: Arc::new(Live::new(record)),
                    cursor: cursor.clone(),
                });
            }
        }
        self.behind = !(events.is_empty() && next == self.cursor);
        self.cursor = next;
        Ok(matching)
    }

    async fn receive(&mut self) -> Result<Vec<Followed>> {
        let mut events = Vec::new();
        match self.live.recv().await {
            Ok(batch) => self.take(&batch, &mut events),
            Err(RecvError::Lagged(_)) => self.behind = true,
            Err(RecvError::Closed) => return Err(Error::shutdown()),
        }
        while events.len() < BATCH && !self.behind {
            match self.live.try_recv() {
                Ok(batch) => self.take(&batch, &mut events),
                Err(TryRecvError::Lagged(_)) => self.behind = true,
                Err(TryRecvError::Empty | TryRecvError::Closed) => break,
            }
        }
        Ok(events)
    }

    /// Events from the end of the log: those that were read already are left out.
    fn take(&mut self, batch: &[Arc<Live>], events: &mut Vec<Followed>) {
        for event in batch {
            let position = event.record.position;
            if self.cursor.covers(position) {
                continue;
            }
            self.cursor.advance(position);
            let event_type = event.record.event.event_type();
            let matches = self.patterns.iter().any(|p| p.matches(event_type));
            if matches && self.sees(&event.record) {
                events.push(Followed {
                    event: event.clone(),
                    cursor: self.cursor.clone(),
                });
            }
        }
    }

    fn sees(&self, record: &Recorded) -> bool {
        let tenant = self.tenant.as_deref();
        tenant.is_none_or(|tenant| record.event.tenant() == Some(tenant))
    }
}
