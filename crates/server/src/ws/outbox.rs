//! The messages that wait for a client. Messages that come within 20 ms are sent together.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use everbus::Cursor;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::follow::Followed;

/// A client with more waiting bytes than this counts as slow, however few messages they are.
const MOST_BYTES: usize = 8 << 20;
/// A frame with several events has at most about this many bytes. A larger event has its own frame.
const FRAME_BYTES: usize = 64 << 10;

/// One waiting message.
enum Item {
    /// A complete message.
    Text(String),
    /// An event of a subscription, and the cursor after it.
    Event {
        subscription: Arc<str>,
        json: Arc<str>,
        cursor: Cursor,
    },
}

impl Item {
    fn bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Event { json, .. } => json.len() + 64,
        }
    }
}

#[derive(Default)]
struct Waiting {
    items: VecDeque<Item>,
    bytes: usize,
    /// Whether the client did not keep up. Then no more messages are added.
    slow: bool,
}

/// The messages that wait for one client.
pub(crate) struct Outbox {
    most: usize,
    waiting: Mutex<Waiting>,
    /// Notified when there is something to send.
    filled: Notify,
    /// Notified when there is room again.
    emptied: Notify,
}

impl Outbox {
    /// An outbox for at most this many messages.
    pub(crate) fn new(most: usize) -> Self {
        Self {
            most,
            waiting: Mutex::default(),
            filled: Notify::new(),
            emptied: Notify::new(),
        }
    }

    /// Adds a message. If the outbox is full, the client is marked as slow.
    pub(crate) fn text(&self, text: String) {
        self.add([Item::Text(text)]);
    }

    /// Adds live events. If the outbox is full, the client is marked as slow.
    pub(crate) fn events(&self, subscription: &Arc<str>, events: &[Followed]) {
        self.add(items(subscription, events));
    }

    /// Adds past events. Waits for room before each, so the client sets the pace.
    pub(crate) async fn past_events(&self, subscription: &Arc<str>, events: &[Followed]) {
        for item in items(subscription, events) {
            self.room().await;
            self.add([item]);
        }
    }

    /// Waits for room, then adds a message.
    pub(crate) async fn text_in_turn(&self, text: String) {
        self.room().await;
        self.text(text);
    }

    /// Waits until half of the outbox is free, or the client is slow.
    async fn room(&self) {
        loop {
            let room = self.emptied.notified();
            {
                let waiting = self.waiting.lock();
                let half = waiting.items.len() * 2 < self.most && waiting.bytes * 2 < MOST_BYTES;
                if half || waiting.slow {
                    return;
                }
            }
            room.await;
        }
    }

    fn add(&self, items: impl IntoIterator<Item = Item>) {
        let mut waiting = self.waiting.lock();
        for item in items {
            let full = waiting.items.len() >= self.most || waiting.bytes > MOST_BYTES;
            if full || waiting.slow {
                waiting.slow = true;
                break;
            }
            waiting.bytes += item.bytes();
            waiting.items.push_back(item);
        }
        drop(waiting);
        self.filled.notify_one();
    }

    /// Waits until there is something to send, or the client is slow. The future may be dropped at any time.
    pub(crate) async fn ready(&self) {
        loop {
            {
                let waiting = self.waiting.lock();
                if waiting.slow || !waiting.items.is_empty() {
                    return;
                }
            }
            self.filled.notified().await;
        }
    }

    /// Whether the client did not keep up.
    pub(crate) fn is_slow(&self) -> bool {
        self.waiting.lock().slow
    }

    /// The next frame: one message, or several consecutive events of one subscription.
    pub(crate) fn frame(&self) -> Option<String> {
        let mut waiting = self.waiting.lock();
        let first = waiting.items.pop_front()?;
        waiting.bytes = waiting.bytes.saturating_sub(first.bytes());
        let (subscription, json, mut cursor) = match first {
            Item::Text(text) => {
                drop(waiting);
                self.emptied.notify_waiters();
                return Some(text);
            }
            Item::Event {
                subscription,
                json,
                cursor,
            } => (subscription, json, cursor),
        };
        let mut frame = String::with_capacity(json.len() + 256);
        frame.push_str("{\"type\":\"data\",\"subscription\":");
        frame.push_str(&quoted(&subscription));
        frame.push_str(",\"events\":[");
        frame.push_str(&json);
        while let Some(Item::Event {
            subscription: of,
            json,
            ..
        }) = waiting.items.front()
        {
            if *of != subscription || frame.len() + json.len() > FRAME_BYTES {
                break;
            }
            frame.push(',');
            frame.push_str(json);
            if let Some(item) = waiting.items.pop_front() {
                waiting.bytes = waiting.bytes.saturating_sub(item.bytes());
                if let Item::Event { cursor: after, .. } = item {
                    cursor = after;
                }
            }
        }
        drop(waiting);
        self.emptied.notify_waiters();
        frame.push_str("],\"cursor\":");
        frame.push_str(&quoted(&cursor.to_string()));
        frame.push('}');
        Some(frame)
    }
}

fn items<'a>(
    subscription: &'a Arc<str>,
    events: &'a [Followed],
) -> impl Iterator<Item = Item> + 'a {
    events.iter().map(|followed| Item::Event {
        subscription: subscription.clone(),
        json: followed.event.json(),
        cursor: followed.cursor.clone(),
    })
}

fn quoted(text: &str) -> String {
    serde_json::to_string(text).unwrap_or_else(|_| "\"\"".to_owned())
}

/// The minimum time between two sends. After a longer pause a frame is sent at once.
pub(crate) const COALESCE: Duration = Duration::from_millis(20);
