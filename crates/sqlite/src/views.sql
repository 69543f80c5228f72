-- Views for people and for the queries of the specifications.

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

-- The table of the outbox specification, over all groups. Filters on event_id use an index.
CREATE VIEW dead_letter_events
  (id, event_id, uuid, event_type, payload, error, stack, errors, attempts, consumer_name, handler,
   first_seen_at, last_seen_at, created_at, retried_at, replaced_by, foreign_id) AS
SELECT
  d.seq || '/' || g.name,
  d.event_id,
  lower(substr(hex(l.id), 1, 8) || '-' || substr(hex(l.id), 9, 4) || '-' || substr(hex(l.id), 13, 4)
    || '-' || substr(hex(l.id), 17, 4) || '-' || substr(hex(l.id), 21)),
  t.name,
  -- The envelope of the specification. A payload that is no JSON is a text, or hexadecimal beside it. The
  -- UUID of a foreign id depends on the source, which the envelope does not say, so it stands beside it.
  '{"event_id":' || json_quote(d.event_id) || ',"occurred_at":"'
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
    || iif(l.attrs ->> '$.foreign_id' IS NULL, '',
         ',"everbus_id":"' || lower(substr(hex(l.id), 1, 8) || '-' || substr(hex(l.id), 9, 4) || '-'
         || substr(hex(l.id), 13, 4) || '-' || substr(hex(l.id), 17, 4) || '-' || substr(hex(l.id), 21)) || '"')
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
SELECT 'outbox/' || event, event_id, substr(event, 1, 36), event_type, payload, error, NULL,
  failures, attempts, 'outbox', NULL, first_seen_at, last_seen_at,
  first_seen_at, retried_at, NULL, NULL
FROM outbox_dead_letters;
