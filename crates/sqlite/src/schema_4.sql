-- From schema version 3 to 4: what became of each attempt, and ephemeral groups.

DROP VIEW events;

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

-- The owner an ephemeral group goes with: owners.id. NULL: the group lasts.
ALTER TABLE groups ADD COLUMN owner INTEGER;

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
        AND NOT EXISTS (SELECT 1 FROM skips s WHERE s.group_id = (SELECT id FROM unnamed) AND s.seq = l.seq)
        AND NOT EXISTS (SELECT 1 FROM dead_letters d WHERE d.seq = l.seq AND d.group_id = (SELECT id FROM unnamed) AND d.retried_at IS NULL)
        AND NOT EXISTS (SELECT 1 FROM deliveries d WHERE d.group_id = (SELECT id FROM unnamed) AND d.seq = l.seq)
    UNION ALL
    SELECT s.seq, 'done', 0, NULL, s.at FROM unnamed u JOIN skips s ON s.group_id = u.id AND s.seq > u.cursor
    UNION ALL
    SELECT l.seq, 'done', coalesce(json_array_length(o.failures), 0), o.failures, coalesce(o.ended_at, s.at)
      FROM log l
      LEFT JOIN outcomes o ON o.seq = l.seq AND o.group_id = (SELECT id FROM unnamed)
      LEFT JOIN skips s ON s.group_id = (SELECT id FROM unnamed) AND s.seq = l.seq
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
