-- The tables of the store. Every name begins with the schema, which a setting may change.

-- HISTORY. An event is only in the indexes of the names (tenant, app, entity) that it has. Names may be longer than an
-- entry of an index, so hashes of them are indexed.
CREATE INDEX log_tenant ON everbus.log (hashtextextended(tenant, 0), seq) WHERE tenant <> '';
CREATE INDEX log_tenant_type ON everbus.log (hashtextextended(tenant, 0), type, seq) WHERE tenant <> '';
CREATE INDEX log_app ON everbus.log (hashtextextended(app, 0), seq) WHERE app IS NOT NULL;
CREATE INDEX log_entity ON everbus.log (hashtextextended(entity_id, 0), seq) WHERE entity_id IS NOT NULL;
-- Events that expire.
CREATE INDEX log_expires ON everbus.log (expires_at, seq) WHERE expires_at IS NOT NULL;

-- The failed attempts of an event in a group, if another broker delivers the event. Deleted with the event.
CREATE TABLE everbus.failures (
  seq      bigint  NOT NULL,                    -- the event in the log
  group_id bigint  NOT NULL,
  failures text    NOT NULL,                    -- JSON array; failures of runs that are over come first
  past     integer NOT NULL,                    -- how many of them belong to runs that are over
  PRIMARY KEY (seq, group_id)
);

-- PAYLOAD STAGES, with the columns of the specification. A stage belongs to an event by its id and tenant:
-- in a store beside a broker, a stage may come before its event. Deleted with the event.
CREATE TABLE everbus.event_payloads (
  id                      bigint  GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  event_id                uuid    NOT NULL,
  stage                   text    COLLATE "C" NOT NULL,
  payload_compressed      bytea   NOT NULL,     -- gzip
  payload_size_original   bigint  NOT NULL,
  payload_size_compressed bigint  NOT NULL,
  timestamp               bigint  NOT NULL,     -- microseconds
  status_code             integer,
  error_details           text,
  contains_media          boolean NOT NULL DEFAULT false,
  contains_base64         boolean NOT NULL DEFAULT false,
  tenant                  text    COLLATE "C" NOT NULL -- '' for none
);
ALTER TABLE everbus.event_payloads ALTER COLUMN payload_compressed SET STORAGE EXTERNAL;
CREATE INDEX event_payloads_event ON everbus.event_payloads (event_id);
CREATE INDEX event_payloads_stage ON everbus.event_payloads (stage);
CREATE INDEX event_payloads_timestamp ON everbus.event_payloads (timestamp, id);
CREATE INDEX event_payloads_size ON everbus.event_payloads (payload_size_original);

-- CHECKPOINTS of long work.
CREATE TABLE everbus.checkpoints (
  name     text COLLATE "C" PRIMARY KEY,
  state    text   NOT NULL,                     -- JSON
  saved_at bigint NOT NULL                      -- microseconds
);

-- OBJECTS without an event: to be deleted from their store, and then from here. An object is noted before
-- it is put; the append of its event deletes the note.
CREATE TABLE everbus.orphaned_objects (
  bucket text    COLLATE "C" NOT NULL,
  key    text    COLLATE "C" NOT NULL,
  id     uuid    NOT NULL,                      -- the event; an event of another tenant may still use the object
  since  bigint  NOT NULL,                      -- microseconds
  unborn boolean NOT NULL,                      -- true: the event is not there yet, false: it is gone
  PRIMARY KEY (bucket, key)
);

-- VALUES by key. Every change takes the next revision of its bucket and holds that row until it commits, so
-- that a watcher sees revisions in their order.
CREATE TABLE everbus.kv_buckets (
  bucket   text COLLATE "C" PRIMARY KEY,
  revision bigint NOT NULL
) WITH (fillfactor = 50);
CREATE TABLE everbus.kv (
  bucket     text COLLATE "C" NOT NULL,
  key        text COLLATE "C" NOT NULL,
  value      bytea  NOT NULL,
  revision   bigint NOT NULL,
  expires_at bigint,                            -- microseconds
  PRIMARY KEY (bucket, key)
);
CREATE INDEX kv_expires ON everbus.kv (bucket, expires_at) WHERE expires_at IS NOT NULL;

-- THE OUTBOX of this schema and the dead letters.

-- Which rows of the outbox an event came from. Ids are unique per tenant, and only an envelope names a tenant.
CREATE VIEW everbus.event_outbox_origins (seq, number) AS
SELECT l.seq, o.number FROM everbus.log l
CROSS JOIN LATERAL (
  SELECT p.number, everbus.everbus_json(p.payload) AS document FROM everbus.event_outbox p
  WHERE p.event_id IN (l.id::text, everbus.everbus_json(l.attrs) ->> 'foreign_id')
) o
WHERE l.tenant = coalesce(CASE
  WHEN json_typeof(o.document) = 'object' AND o.document -> 'event_id' IS NOT NULL
    AND o.document -> 'occurred_at' IS NOT NULL AND o.document -> 'payload' IS NOT NULL
  THEN o.document ->> 'tenant_id' END, '');

-- If an event came through the outbox of this schema, its row has the status failed while a dead letter of the event is
-- open, and the status sent after that. A row without sent_at was given up by the relay, and stays failed.
CREATE FUNCTION everbus.dead_letter_in_outbox() RETURNS trigger LANGUAGE plpgsql AS $everbus$
DECLARE
  event bigint;
BEGIN
  IF NOT EXISTS (SELECT 1 FROM everbus.event_outbox) THEN
    RETURN NULL;
  END IF;
  IF TG_OP <> 'DELETE' AND NEW.retried_at IS NULL THEN
    UPDATE everbus.event_outbox SET status = 'failed', last_error = NEW.failures::json -> -1 ->> 'error'
    WHERE status = 'sent'
      AND number IN (SELECT o.number FROM everbus.event_outbox_origins o WHERE o.seq = NEW.seq);
    RETURN NULL;
  END IF;
  event := CASE WHEN TG_OP = 'DELETE' THEN OLD.seq ELSE NEW.seq END;
  IF NOT EXISTS (SELECT 1 FROM everbus.dead_letters WHERE seq = event AND retried_at IS NULL) THEN
    UPDATE everbus.event_outbox SET status = 'sent'
    WHERE status = 'failed' AND sent_at IS NOT NULL
      AND number IN (SELECT o.number FROM everbus.event_outbox_origins o WHERE o.seq = event);
  END IF;
  RETURN NULL;
END
$everbus$;
CREATE TRIGGER dead_letter_in_outbox AFTER INSERT OR DELETE OR UPDATE OF retried_at ON everbus.dead_letters
FOR EACH ROW EXECUTE FUNCTION everbus.dead_letter_in_outbox();

-- A payload as text, or NULL if it is not UTF-8.
CREATE FUNCTION everbus.text_or_null(payload bytea) RETURNS text LANGUAGE plpgsql IMMUTABLE STRICT AS $everbus$
BEGIN
  RETURN convert_from(payload, 'UTF8');
EXCEPTION WHEN OTHERS THEN
  RETURN NULL;
END
$everbus$;

-- The table of the outbox specification, over all groups. Filters on event_id use an index.
CREATE VIEW everbus.dead_letter_events
  (id, event_id, uuid, event_type, payload, error, stack, errors, attempts, consumer_name, handler,
   first_seen_at, last_seen_at, created_at, retried_at, replaced_by, foreign_id) AS
SELECT
  d.seq || '/' || g.name,
  d.event_id,
  l.id::text,
  t.name,
  -- The envelope of the specification. A payload that is not JSON is written as a text, or as payload_hex if it is not
  -- UTF-8. The UUID of a foreign id depends on the source, which the envelope does not have, so it is in everbus_id.
  '{"event_id":' || to_json(d.event_id)::text || ',"occurred_at":"'
    || regexp_replace(to_char((timestamptz 'epoch' + l.occurred_at * interval '1 microsecond') AT TIME ZONE 'UTC',
         'YYYY-MM-DD"T"HH24:MI:SS.US'), '\.?0*$', '')
    || 'Z","correlation_id":' || coalesce((a.attrs -> 'correlation_id')::text, to_json(d.event_id)::text)
    || ',"tenant_id":' || coalesce((a.attrs -> 'tenant')::text, '""')
    || ',"station_id":' || coalesce((a.attrs -> 'metadata' -> 'station_id')::text, '""')
    || ',"schema_version":' || l.version
    || ',"payload":' || CASE
         WHEN p.text IS NULL THEN 'null,"payload_hex":"' || encode(l.payload, 'hex') || '"'
         WHEN everbus.everbus_json(p.text) IS NOT NULL THEN p.text
         ELSE to_json(p.text)::text
       END
    || CASE WHEN a.attrs -> 'foreign_id' IS NULL THEN '' ELSE ',"everbus_id":"' || l.id || '"' END
    || '}',
  coalesce(f.last ->> 'error', ''),
  f.last ->> 'backtrace',
  d.failures,
  d.attempts,
  g.name,
  d.handler,
  timestamptz 'epoch' + d.first_seen_at * interval '1 microsecond',
  timestamptz 'epoch' + d.died_at * interval '1 microsecond',
  timestamptz 'epoch' + l.received_at * interval '1 microsecond',
  timestamptz 'epoch' + d.retried_at * interval '1 microsecond',
  d.replaced_by::text,
  a.attrs ->> 'foreign_id'
FROM everbus.dead_letters d
JOIN everbus.groups g ON g.id = d.group_id
JOIN everbus.log l ON l.seq = d.seq
JOIN everbus.types t ON t.id = l.type
CROSS JOIN LATERAL (SELECT everbus.everbus_json(l.attrs)) AS a (attrs)
CROSS JOIN LATERAL (SELECT everbus.everbus_json(d.failures) -> -1) AS f (last)
CROSS JOIN LATERAL (SELECT everbus.text_or_null(l.payload)) AS p (text)
UNION ALL
SELECT 'outbox/' || event, event_id, left(event, 36), event_type, payload, error, NULL,
  failures, attempts, 'outbox', NULL, first_seen_at, last_seen_at,
  first_seen_at, retried_at, NULL, NULL
FROM everbus.outbox_dead_letters;
