-- Schema version 1 of an Everbus file.
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
  payload     BLOB    NOT NULL
);
CREATE UNIQUE INDEX log_id ON log (id, tenant);

CREATE TABLE groups (
  id          INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused: leases carry it
  name        TEXT    NOT NULL UNIQUE,        -- '' is the unnamed group
  ordered     INTEGER NOT NULL,
  cursor      INTEGER NOT NULL,               -- everything up to here was handed out or skipped
  declared_at INTEGER NOT NULL,               -- the head of the log when the group was declared
  created_at  INTEGER NOT NULL,
  active_at   INTEGER NOT NULL
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
  done       BLOB
);
CREATE INDEX claims_group ON claims (group_id, lo);

-- What is not plain progress: one row per event and group that waits, or runs on its own.
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
  PRIMARY KEY (seq, group_id)
) WITHOUT ROWID;
CREATE INDEX dead_open       ON dead_letters (seq, group_id)       WHERE retried_at IS NULL;
CREATE INDEX dead_open_group ON dead_letters (group_id, seq)       WHERE retried_at IS NULL;
CREATE INDEX dead_open_type  ON dead_letters (type, seq, group_id) WHERE retried_at IS NULL;
CREATE INDEX dead_open_died  ON dead_letters (died_at)             WHERE retried_at IS NULL;

-- Events a group passed over on purpose, with the reason.
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

-- The columns of the specification's table, as the unnamed group sees each event. Every arm has a
-- constant status, so a filter on status reads only the arms it needs.
CREATE VIEW events (id, type, payload, status, retry_count, last_error, metadata, created_at, updated_at) AS
WITH
  unnamed AS (SELECT id, cursor FROM groups WHERE name = ''),
  undone AS (
    SELECT l.seq, c.owner, c.attempt
    FROM unnamed u
    JOIN claims c ON c.group_id = u.id
    JOIN log l ON l.seq BETWEEN c.lo AND c.hi
    WHERE c.done IS NULL OR (
      ((instr('0123456789ABCDEF', substr(hex(substr(c.done, (l.seq - c.lo) / 8 + 1, 1)), 1, 1)) - 1) * 16
      + instr('0123456789ABCDEF', substr(hex(substr(c.done, (l.seq - c.lo) / 8 + 1, 1)), 2, 1)) - 1)
      >> ((l.seq - c.lo) % 8)) & 1 = 0
  ),
  standing (seq, status, retry_count, failures, updated_at) AS (
    SELECT d.seq, 'dlq', json_array_length(d.failures), d.failures, d.died_at
      FROM unnamed u JOIN dead_letters d ON d.group_id = u.id WHERE d.retried_at IS NULL
    UNION ALL
    SELECT d.seq, 'processing', coalesce(json_array_length(d.failures), 0), d.failures, d.updated_at
      FROM unnamed u JOIN deliveries d ON d.group_id = u.id
      WHERE d.state = 1 OR json_extract(d.failures, '$[#-1].kind') <> 'crash'
    UNION ALL
    SELECT d.seq, 'pending', coalesce(json_array_length(d.failures), 0), d.failures, d.updated_at
      FROM unnamed u JOIN deliveries d ON d.group_id = u.id
      WHERE d.state <> 1 AND coalesce(json_extract(d.failures, '$[#-1].kind'), 'crash') = 'crash'
    UNION ALL
    SELECT seq, 'processing', attempt - 1, NULL, NULL FROM undone WHERE owner <> 0
    UNION ALL
    SELECT seq, 'pending', attempt, json_array(json_object('error', 'the process died while the event was in flight')), NULL
      FROM undone WHERE owner = 0
    UNION ALL
    SELECT l.seq, 'pending', 0, NULL, NULL FROM log l
      WHERE l.seq > coalesce((SELECT cursor FROM unnamed), 0)
        AND NOT EXISTS (SELECT 1 FROM dead_letters d WHERE d.seq = l.seq AND d.group_id = (SELECT id FROM unnamed) AND d.retried_at IS NULL)
        AND NOT EXISTS (SELECT 1 FROM deliveries d WHERE d.group_id = (SELECT id FROM unnamed) AND d.seq = l.seq)
    UNION ALL
    SELECT l.seq, 'done', 0, NULL, NULL FROM log l
      WHERE l.seq <= (SELECT cursor FROM unnamed)
        AND l.seq NOT IN (SELECT seq FROM undone)
        AND NOT EXISTS (SELECT 1 FROM dead_letters d WHERE d.seq = l.seq AND d.group_id = (SELECT id FROM unnamed) AND d.retried_at IS NULL)
        AND NOT EXISTS (SELECT 1 FROM deliveries d WHERE d.group_id = (SELECT id FROM unnamed) AND d.seq = l.seq)
  )
SELECT
  lower(substr(hex(l.id), 1, 8) || '-' || substr(hex(l.id), 9, 4) || '-' || substr(hex(l.id), 13, 4)
    || '-' || substr(hex(l.id), 17, 4) || '-' || substr(hex(l.id), 21)),
  t.name,
  CAST(l.payload AS TEXT),
  s.status,
  s.retry_count,
  (SELECT json_group_array(json_extract(f.value, '$.error')) FROM json_each(s.failures) f
    HAVING s.failures IS NOT NULL),
  json_extract(l.attrs, '$.metadata'),
  strftime('%Y-%m-%dT%H:%M:%fZ', l.received_at / 1000000.0, 'unixepoch'),
  strftime('%Y-%m-%dT%H:%M:%fZ', coalesce(s.updated_at, l.received_at) / 1000000.0, 'unixepoch')
FROM standing s
JOIN log l ON l.seq = s.seq
JOIN types t ON t.id = l.type;
