-- What people and the specifications read.

-- The inbox with the columns of the specification.
CREATE VIEW everbus.processed_events (event_id, consumer_name, processed_at) AS
SELECT i.id::text, g.name, to_timestamp(i.at / 1000000.0)
FROM everbus.groups g JOIN everbus.inbox i ON i.group_id = g.id;

-- The columns of the specification's table. The status is that of the event in the unnamed group.
CREATE VIEW everbus.events (id, type, payload, status, retry_count, last_error, metadata, created_at, updated_at) AS
WITH
  unnamed AS (SELECT id, cursor FROM everbus.groups WHERE name = ''),
  undone AS (
    SELECT l.seq FROM unnamed u
    JOIN everbus.claims c ON c.group_id = u.id
    JOIN everbus.log l ON l.seq BETWEEN c.lo AND c.hi AND NOT c.done @> l.seq
  ),
  standing (seq, status, failures, updated_at) AS (
    SELECT d.seq, 'dlq', d.failures, d.died_at
      FROM unnamed u JOIN everbus.dead_letters d ON d.group_id = u.id WHERE d.retried_at IS NULL
    UNION ALL
    SELECT d.seq,
      CASE WHEN d.state = 1 OR coalesce(d.failures::json -> -1 ->> 'kind', 'crash') <> 'crash'
        THEN 'processing' ELSE 'pending' END,
      d.failures, d.updated_at
      FROM unnamed u JOIN everbus.deliveries d ON d.group_id = u.id
    UNION ALL
    SELECT seq, 'processing', NULL, NULL FROM undone
    UNION ALL
    SELECT l.seq, 'pending', NULL, NULL FROM everbus.log l
      WHERE l.seq > coalesce((SELECT cursor FROM unnamed), 0)
        AND NOT EXISTS (SELECT 1 FROM unnamed u JOIN everbus.skips s ON s.group_id = u.id WHERE s.seq = l.seq)
        AND NOT EXISTS (SELECT 1 FROM unnamed u JOIN everbus.dead_letters d ON d.group_id = u.id WHERE d.seq = l.seq AND d.retried_at IS NULL)
        AND NOT EXISTS (SELECT 1 FROM unnamed u JOIN everbus.deliveries d ON d.group_id = u.id WHERE d.seq = l.seq)
    UNION ALL
    SELECT s.seq, 'done', NULL, s.at FROM unnamed u JOIN everbus.skips s ON s.group_id = u.id AND s.seq > u.cursor
    UNION ALL
    SELECT l.seq, 'done', o.failures, coalesce(o.ended_at, s.at)
      FROM unnamed u
      JOIN everbus.log l ON l.seq <= u.cursor
      LEFT JOIN everbus.outcomes o ON o.seq = l.seq AND o.group_id = u.id
      LEFT JOIN everbus.skips s ON s.group_id = u.id AND s.seq = l.seq
      WHERE NOT EXISTS (SELECT 1 FROM undone WHERE undone.seq = l.seq)
        AND NOT EXISTS (SELECT 1 FROM everbus.dead_letters d WHERE d.seq = l.seq AND d.group_id = u.id AND d.retried_at IS NULL)
        AND NOT EXISTS (SELECT 1 FROM everbus.deliveries d WHERE d.group_id = u.id AND d.seq = l.seq)
  )
SELECT
  l.id::text, t.name, everbus.as_text(l.payload), s.status,
  coalesce(json_array_length(s.failures::json), 0),
  (SELECT json_agg(f.value ->> 'error')::text FROM json_array_elements(s.failures::json) f),
  CASE WHEN position('\u0000' IN l.attrs) > 0 THEN NULL ELSE (l.attrs::json -> 'metadata')::text END,
  to_timestamp(l.received_at / 1000000.0),
  to_timestamp(coalesce(s.updated_at, l.received_at) / 1000000.0)
FROM standing s
JOIN everbus.log l ON l.seq = s.seq
JOIN everbus.types t ON t.id = l.type;
