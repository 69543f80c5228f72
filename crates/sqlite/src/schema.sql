-- The tables of an Everbus file.
--
-- The log is append-only. For a group, an event is done if it is at or below the group's cursor and
-- no claim, delivery or dead letter says otherwise.

CREATE TABLE meta (
  key   TEXT PRIMARY KEY,
  value ANY
) WITHOUT ROWID;

CREATE TABLE types   (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE tenants (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);

CREATE TABLE log (
  seq         INTEGER PRIMARY KEY,            -- given by the writer, never reused
  id          BLOB    NOT NULL,               -- the sixteen bytes of the UUID
  tenant      INTEGER NOT NULL,               -- tenants.id, 0 for none
  type        INTEGER NOT NULL,               -- types.id
  version     INTEGER NOT NULL,
  occurred_at INTEGER NOT NULL,               -- microseconds
  received_at INTEGER NOT NULL,               -- microseconds, never falls as seq rises
  attrs       TEXT,                           -- JSON of the optional attributes
  payload     BLOB    NOT NULL,
  checksum    INTEGER                         -- CRC-32 over the other columns; see checksum.rs
);
CREATE UNIQUE INDEX log_id ON log (id, tenant);

CREATE TABLE groups (
  id          INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused: leases carry it
  name        TEXT    NOT NULL UNIQUE,        -- '' is the unnamed group
  ordered     INTEGER NOT NULL,
  cursor      INTEGER NOT NULL,               -- everything up to here was handed out or skipped
  declared_at INTEGER NOT NULL,               -- the head of the log when the group was declared
  created_at  INTEGER NOT NULL,
  active_at   INTEGER NOT NULL,
  owner       INTEGER                         -- the owner an ephemeral group goes with; NULL: it lasts
);

CREATE TABLE subscriptions (
  id         TEXT PRIMARY KEY,
  event_type TEXT NOT NULL,                   -- the pattern
  created_at TEXT NOT NULL,
  group_id   INTEGER NOT NULL REFERENCES groups (id),
  name       TEXT    NOT NULL,
  after_seq  INTEGER NOT NULL,
  UNIQUE (group_id, name)
);

-- A range of the log handed to one owner. Bit n of done (bit n % 8 of byte n / 8) stands for lo + n;
-- NULL is all zeroes. owner 0: inherited from a process that died, drained one event at a time.
CREATE TABLE claims (
  id         INTEGER PRIMARY KEY AUTOINCREMENT,
  group_id   INTEGER NOT NULL REFERENCES groups (id),
  lo         INTEGER NOT NULL,
  hi         INTEGER NOT NULL,
  owner      INTEGER NOT NULL,
  token      INTEGER NOT NULL,
  until      INTEGER NOT NULL,
  attempt    INTEGER NOT NULL,
  crashed_at INTEGER,
  done       BLOB,
  started    INTEGER                          -- events up to here may have begun; the rest is only reserved
);
CREATE INDEX claims_group ON claims (group_id, lo);

-- Events that wait or are leased one by one: one row for each event and group.
CREATE TABLE deliveries (
  group_id   INTEGER NOT NULL REFERENCES groups (id),
  seq        INTEGER NOT NULL,
  state      INTEGER NOT NULL,                -- 0 waiting, 1 leased, 2 behind its key, 3 no handler
  due        INTEGER NOT NULL,
  attempt    INTEGER NOT NULL,                -- attempts begun
  type       INTEGER NOT NULL,
  key        TEXT,                            -- the ordering key, in ordered groups
  owner      INTEGER NOT NULL DEFAULT 0,
  token      INTEGER NOT NULL DEFAULT 0,
  until      INTEGER NOT NULL DEFAULT 0,
  suspect    INTEGER NOT NULL DEFAULT 0,      -- waits after a crash (only with state 0)
  crashes    INTEGER NOT NULL DEFAULT 0,
  alone      INTEGER NOT NULL DEFAULT 0,      -- handed out with nothing else in flight
  failures   TEXT,                            -- JSON array
  updated_at INTEGER NOT NULL,
  replayed   INTEGER NOT NULL DEFAULT 0,      -- an operator asked for it although the group was done
  PRIMARY KEY (group_id, seq)
) WITHOUT ROWID;
CREATE INDEX deliveries_due ON deliveries (group_id, state, due);
CREATE INDEX deliveries_suspect ON deliveries (group_id, due) WHERE suspect = 1;
CREATE INDEX deliveries_key ON deliveries (group_id, key, seq) WHERE key IS NOT NULL;

CREATE TABLE dead_letters (
  seq           INTEGER NOT NULL,
  group_id      INTEGER NOT NULL REFERENCES groups (id),
  type          INTEGER NOT NULL,
  attempts      INTEGER NOT NULL,
  failures      TEXT    NOT NULL,             -- JSON array
  handler       TEXT,
  first_seen_at INTEGER NOT NULL,
  died_at       INTEGER NOT NULL,
  retried_at    INTEGER,
  replaced_by   BLOB,                         -- the id of the corrected event
  event_id      TEXT    NOT NULL DEFAULT '',  -- as the publisher gave it: the foreign id, else the UUID
  binary        INTEGER NOT NULL DEFAULT 0,   -- the payload is no text
  PRIMARY KEY (seq, group_id)
) WITHOUT ROWID;
CREATE INDEX dead_open       ON dead_letters (seq, group_id)       WHERE retried_at IS NULL;
CREATE INDEX dead_open_group ON dead_letters (group_id, seq)       WHERE retried_at IS NULL;
CREATE INDEX dead_open_type  ON dead_letters (type, seq, group_id) WHERE retried_at IS NULL;
CREATE INDEX dead_died       ON dead_letters (died_at);
CREATE INDEX dead_event      ON dead_letters (event_id);
CREATE INDEX dead_open_died  ON dead_letters (died_at)             WHERE retried_at IS NULL;

-- Events that a group skipped, with the reason. A row beyond the cursor of its group is an event that was dropped
-- from a full stream: the group skips the event when it reaches it.
CREATE TABLE skips (
  group_id INTEGER NOT NULL REFERENCES groups (id),
  seq      INTEGER NOT NULL,
  reason   TEXT    NOT NULL,
  at       INTEGER NOT NULL,
  PRIMARY KEY (group_id, seq)
) WITHOUT ROWID;

-- The processes that consume. An owner is alive while it holds the lock on its lock file.
CREATE TABLE owners (
  id         INTEGER PRIMARY KEY AUTOINCREMENT,
  lock       TEXT    NOT NULL,
  pid        INTEGER NOT NULL,
  started_at INTEGER NOT NULL
);

-- What each group has handled. Rows of removed groups are removed later, in small steps. The number
-- of a group is never used again, so these rows cannot count for another group.
CREATE TABLE inbox (
  group_id INTEGER NOT NULL,                  -- groups.id
  id       BLOB    NOT NULL,                  -- the sixteen bytes of the UUID
  tenant   INTEGER NOT NULL,                  -- tenants.id, 0 for none
  at       INTEGER NOT NULL,                  -- microseconds
  PRIMARY KEY (group_id, id, tenant)
) WITHOUT ROWID;

-- How an event ended in a group after it had failed there. One that worked at its first attempt has no
-- row. Deleted with the event.
CREATE TABLE outcomes (
  seq      INTEGER NOT NULL,                  -- the event in the log
  group_id INTEGER NOT NULL REFERENCES groups (id),
  attempts INTEGER NOT NULL,                  -- begun, the last included
  failures TEXT,                              -- JSON array; NULL is none since the retry of a dead letter
  ended_at INTEGER NOT NULL,                  -- microseconds
  took     INTEGER,                           -- microseconds, of the last attempt
  worker   TEXT,                              -- of the last attempt
  PRIMARY KEY (seq, group_id)
) WITHOUT ROWID;

-- The failed attempts of an event in a group, while the broker has it, and after. Deleted with the event.
CREATE TABLE everbus_failures (
  seq      INTEGER NOT NULL,                  -- the event in the log
  group_id INTEGER NOT NULL REFERENCES groups (id),
  failures TEXT,                              -- JSON array, those of runs that are over first
  past     INTEGER NOT NULL,                  -- so many of them belong to runs that are over
  PRIMARY KEY (seq, group_id)
) WITHOUT ROWID;

-- Payload stages of events that are not in the log yet. They move to event_payloads with the event.
CREATE TABLE everbus_early_payloads (
  id                      INTEGER PRIMARY KEY,
  event                   BLOB    NOT NULL,   -- the sixteen bytes of the UUID
  tenant                  TEXT    NOT NULL,   -- '' for none
  event_id                TEXT    NOT NULL,   -- the columns of event_payloads
  stage                   TEXT    NOT NULL,
  payload_compressed      BLOB    NOT NULL,
  payload_size_original   INTEGER NOT NULL,
  payload_size_compressed INTEGER NOT NULL,
  timestamp               INTEGER NOT NULL,
  status_code             INTEGER,
  error_details           TEXT,
  contains_media          INTEGER NOT NULL DEFAULT 0,
  contains_base64         INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX everbus_early_payloads_event ON everbus_early_payloads (event, tenant);
CREATE INDEX everbus_early_payloads_timestamp ON everbus_early_payloads (timestamp);

-- HISTORY. Runs of postings, written in sorted batches behind the log, and merged as they age. A posting is
-- (scope, seq): a scope is the hash of one of the eight combinations of tenant, app, entity and type, or of
-- a correlation id. What lies beyond the last run is found by reading the log itself.
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
-- The lease for writing runs: one process at a time.
CREATE TABLE history_indexer (
  only   INTEGER PRIMARY KEY CHECK (only = 1),
  holder INTEGER NOT NULL,
  until  INTEGER NOT NULL                     -- microseconds
);

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

-- VALUES by key. Revisions come from the row `kv_revision` of meta.
CREATE TABLE everbus_kv (
  bucket     TEXT    NOT NULL,
  key        TEXT    NOT NULL,
  value      BLOB    NOT NULL,
  revision   INTEGER NOT NULL,
  expires_at INTEGER,                         -- microseconds; NULL: never
  PRIMARY KEY (bucket, key)
) WITHOUT ROWID;
CREATE INDEX everbus_kv_expires ON everbus_kv (expires_at) WHERE expires_at IS NOT NULL;

-- EXPIRY: events with an expiry time. Other events have no row.
CREATE TABLE expirations (
  seq INTEGER PRIMARY KEY,                    -- the event in the log
  at  INTEGER NOT NULL                        -- microseconds
);
CREATE INDEX expirations_at ON expirations (at);

-- OBJECTS without an event: to be deleted from their store, and then from here. An object is noted before
-- it is put; the append of its event removes the note.
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
