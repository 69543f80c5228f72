-- From schema version 2 to 3: the memory. History, outbox, payload stages, audit trail, checkpoints,
-- events that expire, objects that outlived their event.

-- HISTORY. Runs of postings, written in sorted batches some way behind the log, and merged as they
-- age. A posting is (scope, seq): a scope is the hash of one of the eight combinations of tenant, app,
-- entity and type. What lies beyond the last run is found by reading the log itself.
CREATE TABLE history_runs (
  id      INTEGER PRIMARY KEY AUTOINCREMENT,
  level   INTEGER NOT NULL,
  lo      INTEGER NOT NULL,                   -- covers the log from here
  hi      INTEGER NOT NULL,                   -- to here, both included
  events  INTEGER NOT NULL,                   -- in the log when it was written
  state   INTEGER NOT NULL                    -- 0 being written, 1 in use, 2 to be swept away
);
CREATE TABLE history_blocks (
  run   INTEGER NOT NULL,                     -- history_runs.id
  scope INTEGER NOT NULL,                     -- of the first posting in the block
  seq   INTEGER NOT NULL,                     -- of the first posting in the block
  block BLOB    NOT NULL,
  PRIMARY KEY (run, scope, seq)
) WITHOUT ROWID;

-- OUTBOX. The columns of the specifications first; everything has a default that can have one, so that
-- their inserts work as they are written.
CREATE TABLE event_outbox (
  id             TEXT NOT NULL DEFAULT (lower(hex(randomblob(4)) || '-' || hex(randomblob(2)) || '-4'
                   || substr(hex(randomblob(2)), 2) || '-a' || substr(hex(randomblob(2)), 2) || '-'
                   || hex(randomblob(6)))),
  event_id       TEXT NOT NULL DEFAULT (lower(hex(randomblob(4)) || '-' || hex(randomblob(2)) || '-4'
                   || substr(hex(randomblob(2)), 2) || '-a' || substr(hex(randomblob(2)), 2) || '-'
                   || hex(randomblob(6)))),
  event_type     TEXT NOT NULL,
  payload        TEXT NOT NULL,               -- the envelope of the specification, or a raw payload
  status         TEXT NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'sent', 'failed')),
  attempts       INTEGER NOT NULL DEFAULT 0,
  created_at     TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
  sent_at        TEXT,
  correlation_id TEXT,
  trace_id       TEXT,
  last_error     TEXT,
  -- What the envelope has no place for.
  attributes     TEXT,                        -- JSON
  ordering_key   TEXT,
  due            INTEGER NOT NULL DEFAULT 0,  -- microseconds: not to be tried before
  row            INTEGER PRIMARY KEY AUTOINCREMENT
);
CREATE UNIQUE INDEX event_outbox_id ON event_outbox (id);
CREATE INDEX event_outbox_event ON event_outbox (event_id);
CREATE INDEX event_outbox_pending ON event_outbox (row) WHERE status = 'pending';
CREATE INDEX event_outbox_waiting ON event_outbox (due) WHERE status = 'pending' AND attempts > 0;
CREATE INDEX event_outbox_sent ON event_outbox (sent_at) WHERE status = 'sent';
CREATE INDEX event_outbox_failed ON event_outbox (row) WHERE status = 'failed';

-- Sending an event again under the id its row had (as the specification's replay does) takes the place
-- of the old row, if that has had its turn.
CREATE TRIGGER event_outbox_again BEFORE INSERT ON event_outbox
WHEN EXISTS (SELECT 1 FROM event_outbox WHERE id = NEW.id AND event_id = NEW.event_id AND status <> 'pending')
BEGIN
  DELETE FROM event_outbox WHERE id = NEW.id;
END;

-- Rows that the relay gave up on: their events never reached a broker.
CREATE TABLE outbox_dead_letters (
  event_id      TEXT PRIMARY KEY,
  event_type    TEXT NOT NULL,
  payload       TEXT NOT NULL,                -- as it was in the outbox
  error         TEXT NOT NULL,
  attempts      INTEGER NOT NULL,
  first_seen_at TEXT NOT NULL,
  last_seen_at  TEXT NOT NULL,
  retried_at    TEXT
) WITHOUT ROWID;

-- Who relays: one at a time.
CREATE TABLE outbox_relay (
  only   INTEGER PRIMARY KEY CHECK (only = 1),
  holder TEXT    NOT NULL,
  token  INTEGER NOT NULL,
  until  INTEGER NOT NULL                     -- microseconds
);

-- The outbox with the names of the framework specification.
CREATE VIEW event_outbox_framework
  (id, event_type, event_payload, created_at, published_at, correlation_id, trace_id, attempts, last_error) AS
SELECT id, event_type, payload, created_at, iif(status = 'pending', NULL, sent_at), correlation_id,
       trace_id, attempts, last_error
FROM event_outbox;

-- DEAD LETTERS as memory.
ALTER TABLE dead_letters ADD COLUMN replaced_by BLOB; -- the id of the corrected event
ALTER TABLE dead_letters ADD COLUMN event_id TEXT NOT NULL DEFAULT ''; -- the id of the event as text
ALTER TABLE dead_letters ADD COLUMN binary INTEGER NOT NULL DEFAULT 0; -- the payload is no text
UPDATE dead_letters SET event_id = (
  SELECT lower(substr(hex(id), 1, 8) || '-' || substr(hex(id), 9, 4) || '-' || substr(hex(id), 13, 4)
    || '-' || substr(hex(id), 17, 4) || '-' || substr(hex(id), 21)) FROM log WHERE seq = dead_letters.seq)
WHERE seq IN (SELECT seq FROM log);
CREATE INDEX dead_died ON dead_letters (died_at);
CREATE INDEX dead_event ON dead_letters (event_id);

-- A delivery that somebody asked for although the group was done with the event.
ALTER TABLE deliveries ADD COLUMN replayed INTEGER NOT NULL DEFAULT 0;

-- The table of the outbox specification, over all groups. Filters on event_id use an index.
CREATE VIEW dead_letter_events
  (id, event_id, event_type, payload, error, stack, errors, attempts, consumer_name, handler,
   first_seen_at, last_seen_at, created_at, retried_at, replaced_by, foreign_id) AS
SELECT
  d.seq || '/' || g.name,
  d.event_id,
  t.name,
  -- The envelope of the specification. A payload that is no JSON is a text, or hexadecimal beside it.
  '{"event_id":"' || d.event_id || '","occurred_at":"'
    || strftime('%Y-%m-%dT%H:%M:%S', (l.occurred_at - ((l.occurred_at % 1000000 + 1000000) % 1000000)) / 1000000, 'unixepoch')
    || rtrim(rtrim(printf('.%06d', (l.occurred_at % 1000000 + 1000000) % 1000000), '0'), '.')
    || 'Z","correlation_id":' || json_quote(coalesce(l.attrs ->> '$.correlation_id', d.event_id))
    || ',"tenant_id":' || json_quote(coalesce(l.attrs ->> '$.tenant', ''))
    || ',"station_id":' || json_quote(coalesce(l.attrs ->> '$.metadata.station_id', ''))
    || ',"schema_version":' || l.version
    || ',"payload":' || CASE
         WHEN d.binary THEN 'null,"payload_hex":"' || lower(hex(l.payload)) || '"'
         WHEN json_valid(CAST(l.payload AS TEXT)) THEN CAST(l.payload AS TEXT)
         ELSE json_quote(CAST(l.payload AS TEXT))
       END
    || '}',
  coalesce(json_extract(d.failures, '$[#-1].error'), ''),
  json_extract(d.failures, '$[#-1].backtrace'),
  d.failures,
  d.attempts,
  g.name,
  d.handler,
  strftime('%Y-%m-%dT%H:%M:%fZ', d.first_seen_at / 1000000.0, 'unixepoch'),
  strftime('%Y-%m-%dT%H:%M:%fZ', d.died_at / 1000000.0, 'unixepoch'),
  strftime('%Y-%m-%dT%H:%M:%fZ', l.received_at / 1000000.0, 'unixepoch'),
  strftime('%Y-%m-%dT%H:%M:%fZ', d.retried_at / 1000000.0, 'unixepoch'),
  iif(d.replaced_by IS NULL, NULL,
    lower(substr(hex(d.replaced_by), 1, 8) || '-' || substr(hex(d.replaced_by), 9, 4) || '-'
      || substr(hex(d.replaced_by), 13, 4) || '-' || substr(hex(d.replaced_by), 17, 4) || '-'
      || substr(hex(d.replaced_by), 21))),
  l.attrs ->> '$.foreign_id'
FROM dead_letters d
JOIN groups g ON g.id = d.group_id
JOIN log l ON l.seq = d.seq
JOIN types t ON t.id = l.type
UNION ALL
SELECT 'outbox/' || event_id, event_id, event_type, payload, error, NULL,
  json_array(json_object('error', error)), attempts, 'outbox', NULL, first_seen_at, last_seen_at,
  first_seen_at, retried_at, NULL, NULL
FROM outbox_dead_letters;

-- A dead letter of an event that came through the outbox of this file.
CREATE TRIGGER dead_letter_fails_outbox AFTER INSERT ON dead_letters
WHEN EXISTS (SELECT 1 FROM event_outbox)
BEGIN
  UPDATE event_outbox SET status = 'failed', last_error = json_extract(NEW.failures, '$[#-1].error')
  WHERE status = 'sent' AND event_id = (
    SELECT lower(substr(hex(id), 1, 8) || '-' || substr(hex(id), 9, 4) || '-' || substr(hex(id), 13, 4)
      || '-' || substr(hex(id), 17, 4) || '-' || substr(hex(id), 21)) FROM log WHERE seq = NEW.seq);
END;
CREATE TRIGGER dead_letter_again_fails_outbox AFTER UPDATE OF retried_at ON dead_letters
WHEN NEW.retried_at IS NULL AND EXISTS (SELECT 1 FROM event_outbox)
BEGIN
  UPDATE event_outbox SET status = 'failed', last_error = json_extract(NEW.failures, '$[#-1].error')
  WHERE status = 'sent' AND event_id = (
    SELECT lower(substr(hex(id), 1, 8) || '-' || substr(hex(id), 9, 4) || '-' || substr(hex(id), 13, 4)
      || '-' || substr(hex(id), 17, 4) || '-' || substr(hex(id), 21)) FROM log WHERE seq = NEW.seq);
END;

-- PAYLOAD STAGES, with the columns of the specification. Deleted with the event.
CREATE TABLE event_payloads (
  id                      INTEGER PRIMARY KEY,
  event_id                TEXT    NOT NULL,
  stage                   TEXT    NOT NULL,
  payload_compressed      BLOB    NOT NULL,   -- gzip
  payload_size_original   INTEGER NOT NULL,
  payload_size_compressed INTEGER NOT NULL,
  timestamp               INTEGER NOT NULL,   -- microseconds
  status_code             INTEGER,
  error_details           TEXT,
  contains_media          INTEGER NOT NULL DEFAULT 0,
  contains_base64         INTEGER NOT NULL DEFAULT 0,
  seq                     INTEGER NOT NULL    -- the event in the log
);
CREATE INDEX event_payloads_seq ON event_payloads (seq);
CREATE INDEX event_payloads_event_id ON event_payloads (event_id);
CREATE INDEX event_payloads_stage ON event_payloads (stage);
CREATE INDEX event_payloads_timestamp ON event_payloads (timestamp);
CREATE INDEX event_payloads_size ON event_payloads (payload_size_original);

-- AUDIT TRAIL. Append-only; only retention may take from the beginning, and leaves an anchor.
CREATE TABLE audit_log (
  seq            INTEGER PRIMARY KEY,         -- from 1, without gaps
  at             INTEGER NOT NULL,            -- microseconds
  actor          TEXT    NOT NULL,
  action         TEXT    NOT NULL,
  entity_type    TEXT,
  entity_id      TEXT,
  tenant         TEXT,
  correlation_id TEXT,
  trace_id       TEXT,
  details        TEXT,                        -- JSON
  hash           BLOB    NOT NULL             -- SHA-256 over the hash before it and this row
);
CREATE INDEX audit_log_entity ON audit_log (entity_id, entity_type, seq) WHERE entity_id IS NOT NULL;
CREATE INDEX audit_log_actor ON audit_log (actor, seq);
CREATE INDEX audit_log_at ON audit_log (at);
CREATE TABLE audit_anchor (
  only INTEGER PRIMARY KEY CHECK (only = 1),
  seq  INTEGER NOT NULL,                      -- the last record that retention removed
  hash BLOB    NOT NULL,
  at   INTEGER NOT NULL
);
CREATE TRIGGER audit_log_no_update BEFORE UPDATE ON audit_log
BEGIN
  SELECT RAISE(ABORT, 'the audit trail is append-only: records are never changed');
END;
CREATE TRIGGER audit_log_no_delete BEFORE DELETE ON audit_log
WHEN OLD.seq > coalesce((SELECT seq FROM audit_anchor), 0)
BEGIN
  SELECT RAISE(ABORT, 'the audit trail is append-only: only retention removes records');
END;
CREATE TRIGGER audit_log_no_replace BEFORE INSERT ON audit_log
WHEN EXISTS (SELECT 1 FROM audit_log WHERE seq = NEW.seq)
BEGIN
  SELECT RAISE(ABORT, 'the audit trail is append-only: records are never replaced');
END;

-- CHECKPOINTS of long work.
CREATE TABLE checkpoints (
  name     TEXT PRIMARY KEY,
  state    TEXT    NOT NULL,                  -- JSON
  saved_at INTEGER NOT NULL                   -- microseconds
) WITHOUT ROWID;

-- EXPIRY: events that say themselves until when they are wanted.
CREATE TABLE expirations (
  at  INTEGER NOT NULL,                       -- microseconds
  seq INTEGER NOT NULL,
  PRIMARY KEY (at, seq)
) WITHOUT ROWID;

-- OBJECTS whose events are gone: to be deleted from their store, and then from here.
CREATE TABLE orphaned_objects (
  bucket TEXT    NOT NULL,
  key    TEXT    NOT NULL,
  id     BLOB    NOT NULL,                    -- the event; another tenant's may still use the object
  since  INTEGER NOT NULL,                    -- microseconds
  PRIMARY KEY (bucket, key)
) WITHOUT ROWID;
