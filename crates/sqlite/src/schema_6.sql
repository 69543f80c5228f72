-- From schema version 5 to 6: dead_letter_events shows the ids that publishers gave.

-- The id as text, as the publisher gave it: the foreign id, else the UUID.
UPDATE dead_letters SET event_id = (SELECT attrs ->> '$.foreign_id' FROM log WHERE seq = dead_letters.seq)
WHERE (SELECT attrs ->> '$.foreign_id' FROM log WHERE seq = dead_letters.seq) IS NOT NULL;

DROP VIEW dead_letter_events;

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
