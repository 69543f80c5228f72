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
-- Two blocks fill a page. The index is small, so that finding a block reads few pages.
CREATE TABLE history_blocks (
  id    INTEGER PRIMARY KEY,
  run   INTEGER NOT NULL,                     -- history_runs.id
  scope INTEGER NOT NULL,                     -- of the first posting in the block
  seq   INTEGER NOT NULL,                     -- of the first posting in the block
  block BLOB    NOT NULL                      -- the other postings
);
CREATE UNIQUE INDEX history_blocks_first ON history_blocks (run, scope, seq);
-- Who writes runs: one process at a time.
CREATE TABLE history_indexer (
  only   INTEGER PRIMARY KEY CHECK (only = 1),
  holder INTEGER NOT NULL,
  until  INTEGER NOT NULL                     -- microseconds
);

-- OUTBOX: see outbox.sql, which comes first.

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
SELECT 'outbox/' || event, event_id, event_type, payload, error, NULL,
  failures, attempts, 'outbox', NULL, first_seen_at, last_seen_at,
  first_seen_at, retried_at, NULL, NULL
FROM outbox_dead_letters;

-- Which rows of the outbox of this file an event came from.
CREATE VIEW event_outbox_origins (seq, row) AS
SELECT l.seq, o.row FROM log l CROSS JOIN event_outbox o
WHERE o.event_id IN (
    lower(substr(hex(l.id), 1, 8) || '-' || substr(hex(l.id), 9, 4) || '-' || substr(hex(l.id), 13, 4)
      || '-' || substr(hex(l.id), 17, 4) || '-' || substr(hex(l.id), 21)),
    l.attrs ->> '$.foreign_id')
  -- Ids are unique per tenant. Only an envelope says one.
  AND coalesce(l.attrs ->> '$.tenant', '') = coalesce(
    CASE WHEN json_valid(CAST(o.payload AS TEXT)) THEN
      iif(json_type(CAST(o.payload AS TEXT), '$.event_id') IS NOT NULL
          AND json_type(CAST(o.payload AS TEXT), '$.occurred_at') IS NOT NULL
          AND json_type(CAST(o.payload AS TEXT), '$.payload') IS NOT NULL,
        CAST(o.payload AS TEXT) ->> '$.tenant_id', '')
    END, '');

-- A dead letter of an event that came through the outbox of this file: its row shows it for as long as
-- the dead letter is open, and is sent again after that. A row without a time of sending was given up by
-- the relay, and stays so.
CREATE TRIGGER dead_letter_fails_outbox AFTER INSERT ON dead_letters
WHEN NEW.retried_at IS NULL AND EXISTS (SELECT 1 FROM event_outbox)
BEGIN
  UPDATE event_outbox SET status = 'failed', last_error = json_extract(NEW.failures, '$[#-1].error')
  WHERE +status = 'sent' AND row IN (SELECT row FROM event_outbox_origins WHERE seq = NEW.seq);
END;
CREATE TRIGGER dead_letter_again_fails_outbox AFTER UPDATE OF retried_at ON dead_letters
WHEN NEW.retried_at IS NULL AND EXISTS (SELECT 1 FROM event_outbox)
BEGIN
  UPDATE event_outbox SET status = 'failed', last_error = json_extract(NEW.failures, '$[#-1].error')
  WHERE +status = 'sent' AND row IN (SELECT row FROM event_outbox_origins WHERE seq = NEW.seq);
END;
CREATE TRIGGER dead_letter_retried_frees_outbox AFTER UPDATE OF retried_at ON dead_letters
WHEN NEW.retried_at IS NOT NULL AND EXISTS (SELECT 1 FROM event_outbox WHERE status = 'failed')
  AND NOT EXISTS (SELECT 1 FROM dead_letters WHERE seq = NEW.seq AND retried_at IS NULL)
BEGIN
  UPDATE event_outbox SET status = 'sent'
  WHERE +status = 'failed' AND sent_at IS NOT NULL
    AND row IN (SELECT row FROM event_outbox_origins WHERE seq = NEW.seq);
END;
CREATE TRIGGER dead_letter_gone_frees_outbox AFTER DELETE ON dead_letters
WHEN OLD.retried_at IS NULL AND EXISTS (SELECT 1 FROM event_outbox WHERE status = 'failed')
  AND NOT EXISTS (SELECT 1 FROM dead_letters WHERE seq = OLD.seq AND retried_at IS NULL)
BEGIN
  UPDATE event_outbox SET status = 'sent'
  WHERE +status = 'failed' AND sent_at IS NOT NULL
    AND row IN (SELECT row FROM event_outbox_origins WHERE seq = OLD.seq);
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
CREATE INDEX audit_log_action ON audit_log (action, seq);
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
CREATE TRIGGER audit_log_no_gap BEFORE INSERT ON audit_log
WHEN NEW.seq <> 1 + coalesce((SELECT max(seq) FROM audit_log), (SELECT seq FROM audit_anchor), 0)
BEGIN
  SELECT RAISE(ABORT, 'the audit trail is append-only: a record is added at the end');
END;
CREATE TRIGGER audit_anchor_insert BEFORE INSERT ON audit_anchor
WHEN EXISTS (SELECT 1 FROM audit_anchor)
  OR NEW.hash IS NOT (SELECT hash FROM audit_log WHERE seq = NEW.seq)
BEGIN
  SELECT RAISE(ABORT, 'the anchor of the audit trail is a record of it');
END;
CREATE TRIGGER audit_anchor_update BEFORE UPDATE ON audit_anchor
WHEN NEW.seq <= OLD.seq OR NEW.hash IS NOT (SELECT hash FROM audit_log WHERE seq = NEW.seq)
BEGIN
  SELECT RAISE(ABORT, 'the anchor of the audit trail only moves on, to a record of it');
END;
CREATE TRIGGER audit_anchor_no_delete BEFORE DELETE ON audit_anchor
BEGIN
  SELECT RAISE(ABORT, 'the anchor of the audit trail is never removed');
END;

-- CHECKPOINTS of long work.
CREATE TABLE checkpoints (
  name     TEXT PRIMARY KEY,
  state    TEXT    NOT NULL,                  -- JSON
  saved_at INTEGER NOT NULL                   -- microseconds
) WITHOUT ROWID;

-- EXPIRY: events that say themselves until when they are wanted. The others have no row.
CREATE TABLE expirations (
  seq INTEGER PRIMARY KEY,                    -- the event in the log
  at  INTEGER NOT NULL                        -- microseconds
);
CREATE INDEX expirations_at ON expirations (at);

-- OBJECTS without an event: to be deleted from their store, and then from here. An object is noted before
-- it is put; the append of its event strikes the note off.
CREATE TABLE orphaned_objects (
  bucket TEXT    NOT NULL,
  key    TEXT    NOT NULL,
  id     BLOB    NOT NULL,                    -- the event; another tenant's may still use the object
  since  INTEGER NOT NULL,                    -- microseconds
  unborn INTEGER NOT NULL DEFAULT 0,          -- 1: the event is not there yet, 0: it is gone
  PRIMARY KEY (bucket, key)
) WITHOUT ROWID;

-- Which log this is, so that objects can be told from those of another log. A copy gets another id.
INSERT OR REPLACE INTO meta (key, value) VALUES ('log_id', randomblob(16));
