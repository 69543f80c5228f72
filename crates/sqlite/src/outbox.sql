-- The outbox: in every Everbus file, and in users' databases. The columns of the specifications come
-- first. Every column that can have a default has one, so that the inserts of the specifications work
-- as they are written.
CREATE TABLE IF NOT EXISTS event_outbox (
  id             TEXT NOT NULL DEFAULT (lower(hex(randomblob(4)) || '-' || hex(randomblob(2)) || '-4'
                   || substr(hex(randomblob(2)), 2) || '-a' || substr(hex(randomblob(2)), 2) || '-'
                   || hex(randomblob(6)))),
  event_id       TEXT NOT NULL DEFAULT (lower(hex(randomblob(4)) || '-' || hex(randomblob(2)) || '-4'
                   || substr(hex(randomblob(2)), 2) || '-a' || substr(hex(randomblob(2)), 2) || '-'
                   || hex(randomblob(6)))),
  event_type     TEXT NOT NULL,
  payload        TEXT NOT NULL,               -- the envelope of the specification, or a raw payload
  status         TEXT NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'sent', 'failed')),
  attempts       INTEGER NOT NULL DEFAULT 0,  -- rejected ones
  created_at     TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
  sent_at        TEXT,                        -- when the broker acknowledged it; none if it was given up
  correlation_id TEXT,
  trace_id       TEXT,
  last_error     TEXT,
  -- What the envelope has no place for.
  attributes     TEXT,                        -- JSON
  ordering_key   TEXT,
  due            INTEGER NOT NULL DEFAULT 0,  -- microseconds: not to be tried before
  revision       INTEGER NOT NULL DEFAULT 0,  -- how often the event in it was changed
  wanted_at      TEXT,                        -- when it was made to wait again
  failures       TEXT,                        -- JSON: the rejections; with the last they go to the dead letter
  row            INTEGER PRIMARY KEY AUTOINCREMENT
);
CREATE UNIQUE INDEX IF NOT EXISTS event_outbox_id ON event_outbox (id);
CREATE INDEX IF NOT EXISTS event_outbox_event ON event_outbox (event_id);
-- Includes the due time, so that waiting rows are skipped without being read.
CREATE INDEX IF NOT EXISTS event_outbox_pending ON event_outbox (row, due) WHERE status = 'pending';
CREATE INDEX IF NOT EXISTS event_outbox_waiting ON event_outbox (due) WHERE status = 'pending' AND attempts > 0;
CREATE INDEX IF NOT EXISTS event_outbox_sent ON event_outbox (sent_at) WHERE status = 'sent';
CREATE INDEX IF NOT EXISTS event_outbox_failed ON event_outbox (row) WHERE status = 'failed';

-- An event that is inserted again under the id of its row (as the replay of the specification does) replaces
-- the old row if that row is finished. If the same row still waits, nothing changes.
CREATE TRIGGER IF NOT EXISTS event_outbox_again BEFORE INSERT ON event_outbox
WHEN EXISTS (SELECT 1 FROM event_outbox WHERE id = NEW.id AND event_id = NEW.event_id)
BEGIN
  SELECT RAISE(IGNORE) FROM event_outbox
  WHERE id = NEW.id AND status = 'pending' AND event_type = NEW.event_type AND payload = NEW.payload;
  DELETE FROM event_outbox WHERE id = NEW.id AND status <> 'pending';
END;

-- If the event of a row is changed while a relay holds the old one, the relay detects it by the revision.
CREATE TRIGGER IF NOT EXISTS event_outbox_changed
AFTER UPDATE OF event_id, event_type, payload, created_at, correlation_id, trace_id, attributes, ordering_key
ON event_outbox
WHEN NEW.event_id IS NOT OLD.event_id OR NEW.event_type IS NOT OLD.event_type
  OR NEW.payload IS NOT OLD.payload OR NEW.created_at IS NOT OLD.created_at
  OR NEW.correlation_id IS NOT OLD.correlation_id OR NEW.trace_id IS NOT OLD.trace_id
  OR NEW.attributes IS NOT OLD.attributes OR NEW.ordering_key IS NOT OLD.ordering_key
BEGIN
  UPDATE event_outbox SET revision = OLD.revision + 1 WHERE row = NEW.row;
END;

-- If a sent or failed row is set to wait again, its event must be handled again.
CREATE TRIGGER IF NOT EXISTS event_outbox_wanted AFTER UPDATE OF status ON event_outbox
WHEN NEW.status = 'pending' AND OLD.status <> 'pending' AND NEW.wanted_at IS OLD.wanted_at
BEGIN
  UPDATE event_outbox SET wanted_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now') WHERE row = NEW.row;
END;

-- Rows that the relay gave up on: their events never reached a broker. One for each event, and ids are
-- unique per tenant.
CREATE TABLE IF NOT EXISTS outbox_dead_letters (
  event         TEXT PRIMARY KEY,             -- the UUID of the event, and @ and its tenant if it has one
  event_id      TEXT NOT NULL,
  event_type    TEXT NOT NULL,
  payload       TEXT NOT NULL,                -- as it was in the outbox
  error         TEXT NOT NULL,
  attempts      INTEGER NOT NULL,
  first_seen_at TEXT NOT NULL,
  last_seen_at  TEXT NOT NULL,
  retried_at    TEXT,
  row           INTEGER NOT NULL,             -- the row of the outbox that failed last
  failures      TEXT NOT NULL DEFAULT '[]'    -- JSON: every rejection, oldest first
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS outbox_dead_letters_event ON outbox_dead_letters (event_id);
CREATE INDEX IF NOT EXISTS outbox_dead_letters_row ON outbox_dead_letters (row);
CREATE INDEX IF NOT EXISTS outbox_dead_letters_died ON outbox_dead_letters (last_seen_at);

-- The lease of the relays: one relay works at a time.
CREATE TABLE IF NOT EXISTS outbox_relay (
  only   INTEGER PRIMARY KEY CHECK (only = 1),
  holder TEXT    NOT NULL,
  token  INTEGER NOT NULL,
  until  INTEGER NOT NULL,                    -- microseconds
  since  INTEGER NOT NULL                     -- the last row that was there when it changed hands
);

-- The outbox with the names of the framework specification.
CREATE VIEW IF NOT EXISTS event_outbox_framework
  (id, event_type, event_payload, created_at, published_at, correlation_id, trace_id, attempts, last_error) AS
SELECT id, event_type, payload, created_at, iif(status = 'pending', NULL, sent_at), correlation_id,
       trace_id, attempts, last_error
FROM event_outbox;
