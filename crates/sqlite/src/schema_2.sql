-- From schema version 1 to 2: the inbox, and events that a group skips before it reaches them.
--
-- A row in skips beyond the cursor of its group: dropped from a full stream; the group passes it by.

-- The columns of the specification's table are shown by another view below.
DROP VIEW events;

-- Early files of version 1 gave the number of a removed group to the next one. No number may come
-- again: leases and the inbox go by it.
CREATE TABLE groups_2 (
  id          INTEGER PRIMARY KEY AUTOINCREMENT,
  name        TEXT    NOT NULL UNIQUE,        -- '' is the unnamed group
  ordered     INTEGER NOT NULL,
  cursor      INTEGER NOT NULL,               -- everything up to here was handed out or skipped
  declared_at INTEGER NOT NULL,               -- the head of the log when the group was declared
  created_at  INTEGER NOT NULL,
  active_at   INTEGER NOT NULL
);
INSERT INTO groups_2 SELECT * FROM groups;
INSERT INTO sqlite_sequence (name, seq)
  SELECT 'groups_2', seq FROM sqlite_sequence WHERE name = 'groups'
    AND NOT EXISTS (SELECT 1 FROM groups);
UPDATE sqlite_sequence SET seq = max(seq, coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'groups'), 0))
  WHERE name = 'groups_2';
DROP TABLE groups;
ALTER TABLE groups_2 RENAME TO groups;

-- What each group has handled. Rows of removed groups are swept up later, in small steps; the number
-- of a group is never given again, so that they cannot be taken for another's.
CREATE TABLE inbox (
  group_id INTEGER NOT NULL,                  -- groups.id
  id       BLOB    NOT NULL,                  -- the sixteen bytes of the UUID
  tenant   INTEGER NOT NULL,                  -- tenants.id, 0 for none
  at       INTEGER NOT NULL,                  -- microseconds
  PRIMARY KEY (group_id, id, tenant)
) WITHOUT ROWID;

-- The inbox with the columns of the specification.
CREATE VIEW processed_events (event_id, consumer_name, processed_at) AS
SELECT
  lower(substr(hex(i.id), 1, 8) || '-' || substr(hex(i.id), 9, 4) || '-' || substr(hex(i.id), 13, 4)
    || '-' || substr(hex(i.id), 17, 4) || '-' || substr(hex(i.id), 21)),
  g.name,
  strftime('%Y-%m-%dT%H:%M:%fZ', i.at / 1000000.0, 'unixepoch')
FROM groups g
JOIN inbox i ON i.group_id = g.id;

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
    SELECT s.seq, 'done', 0, NULL, NULL FROM unnamed u JOIN skips s ON s.group_id = u.id AND s.seq > u.cursor
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
