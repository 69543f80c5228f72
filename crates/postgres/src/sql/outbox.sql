-- The outbox: in the schema of every engine, and in users' schemas. The columns of the specifications come
-- first. Every column that can have a default has one, so that the inserts of the specifications work
-- as they are written. Names begin with the schema, which a setting may change; running this again does nothing.

-- The text as JSON, or NULL if it is not JSON.
CREATE OR REPLACE FUNCTION everbus.everbus_json(document text) RETURNS json
LANGUAGE plpgsql IMMUTABLE AS $everbus$
BEGIN
  RETURN document::json;
EXCEPTION WHEN OTHERS THEN
  RETURN NULL;
END
$everbus$;

CREATE TABLE IF NOT EXISTS everbus.event_outbox (
  id             text        NOT NULL DEFAULT gen_random_uuid()::text,
  event_id       text        NOT NULL DEFAULT gen_random_uuid()::text,
  event_type     text        NOT NULL,
  payload        text        NOT NULL,              -- the envelope of the specification, or a raw payload
  status         text        NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'sent', 'failed')),
  attempts       integer     NOT NULL DEFAULT 0,    -- attempts that the broker rejected
  created_at     timestamptz NOT NULL DEFAULT now(),
  sent_at        timestamptz,                       -- when the broker acknowledged it; NULL if it was given up
  correlation_id text,
  trace_id       text,
  last_error     text,
  -- What the envelope has no place for.
  attributes     text,                              -- JSON
  ordering_key   text,
  due            bigint      NOT NULL DEFAULT 0,    -- microseconds: not to be tried before
  revision       bigint      NOT NULL DEFAULT 0,    -- how often the event in it was changed
  wanted_at      timestamptz,                       -- when it became pending again
  failures       text,                              -- JSON: the rejections; the last one moves them to the dead letter
  number         bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY
);
CREATE UNIQUE INDEX IF NOT EXISTS event_outbox_id ON everbus.event_outbox (id);
CREATE INDEX IF NOT EXISTS event_outbox_event ON everbus.event_outbox USING hash (event_id);
CREATE INDEX IF NOT EXISTS event_outbox_pending ON everbus.event_outbox (number) WHERE status = 'pending';
CREATE INDEX IF NOT EXISTS event_outbox_waiting ON everbus.event_outbox (due) WHERE status = 'pending' AND attempts > 0;
CREATE INDEX IF NOT EXISTS event_outbox_sent ON everbus.event_outbox (sent_at) WHERE status = 'sent';
CREATE INDEX IF NOT EXISTS event_outbox_failed ON everbus.event_outbox (number) WHERE status = 'failed';

-- An insert with the id and the event of an existing row (as the specification's replay does it) replaces that row,
-- unless the row is still pending. If the same row is still pending, the insert does nothing.
CREATE OR REPLACE FUNCTION everbus.event_outbox_again() RETURNS trigger
LANGUAGE plpgsql AS $everbus$
DECLARE
  there everbus.event_outbox%ROWTYPE;
BEGIN
  SELECT * INTO there FROM everbus.event_outbox WHERE id = NEW.id AND event_id = NEW.event_id;
  IF FOUND THEN
    IF there.status <> 'pending' THEN
      DELETE FROM everbus.event_outbox WHERE number = there.number AND status <> 'pending';
    ELSIF there.event_type = NEW.event_type AND there.payload = NEW.payload THEN
      RETURN NULL;
    END IF;
  END IF;
  RETURN NEW;
END
$everbus$;

-- A change of the event in a row gives the row a new revision, so that a relay that has the old event notices. A row
-- that becomes pending again gets a new wanted_at: its event is to be handled again.
CREATE OR REPLACE FUNCTION everbus.event_outbox_changed() RETURNS trigger
LANGUAGE plpgsql AS $everbus$
BEGIN
  IF (NEW.event_id, NEW.event_type, NEW.payload, NEW.created_at, NEW.correlation_id, NEW.trace_id,
      NEW.attributes, NEW.ordering_key)
    IS DISTINCT FROM (OLD.event_id, OLD.event_type, OLD.payload, OLD.created_at, OLD.correlation_id,
      OLD.trace_id, OLD.attributes, OLD.ordering_key)
  THEN
    NEW.revision := OLD.revision + 1;
  END IF;
  IF NEW.status = 'pending' AND OLD.status <> 'pending' THEN
    IF NEW.wanted_at IS NOT DISTINCT FROM OLD.wanted_at THEN
      NEW.wanted_at := clock_timestamp();
    END IF;
    PERFORM pg_notify(TG_TABLE_SCHEMA || '_wake', '');
  END IF;
  RETURN NEW;
END
$everbus$;

-- Wakes the relays when the transaction commits.
CREATE OR REPLACE FUNCTION everbus.event_outbox_wake() RETURNS trigger
LANGUAGE plpgsql AS $everbus$
BEGIN
  PERFORM pg_notify(TG_TABLE_SCHEMA || '_wake', '');
  RETURN NULL;
END
$everbus$;

CREATE OR REPLACE TRIGGER event_outbox_again BEFORE INSERT ON everbus.event_outbox
FOR EACH ROW EXECUTE FUNCTION everbus.event_outbox_again();
CREATE OR REPLACE TRIGGER event_outbox_changed BEFORE UPDATE ON everbus.event_outbox
FOR EACH ROW WHEN (NEW.status = 'pending') EXECUTE FUNCTION everbus.event_outbox_changed();
CREATE OR REPLACE TRIGGER event_outbox_wake AFTER INSERT ON everbus.event_outbox
FOR EACH STATEMENT EXECUTE FUNCTION everbus.event_outbox_wake();

-- Rows that the relay gave up on: their events never reached a broker. One row for each event. Ids are unique per
-- tenant.
CREATE TABLE IF NOT EXISTS everbus.outbox_dead_letters (
  event         text        NOT NULL,           -- the UUID of the event, and @ and its tenant if it has one
  event_id      text        NOT NULL,
  event_type    text        NOT NULL,
  payload       text        NOT NULL,           -- as it was in the outbox
  error         text        NOT NULL,
  attempts      integer     NOT NULL,
  first_seen_at timestamptz NOT NULL,
  last_seen_at  timestamptz NOT NULL,
  retried_at    timestamptz,
  number        bigint      NOT NULL,           -- the row of the outbox that failed last
  failures      text        NOT NULL DEFAULT '[]' -- JSON: every rejection, oldest first
);
-- A tenant may be longer than an entry of an index.
CREATE UNIQUE INDEX IF NOT EXISTS outbox_dead_letters_name ON everbus.outbox_dead_letters (md5(event));
CREATE INDEX IF NOT EXISTS outbox_dead_letters_event ON everbus.outbox_dead_letters USING hash (event_id);
CREATE INDEX IF NOT EXISTS outbox_dead_letters_number ON everbus.outbox_dead_letters (number);
CREATE INDEX IF NOT EXISTS outbox_dead_letters_died ON everbus.outbox_dead_letters (last_seen_at);

-- The lease of the relay: one relay at a time.
CREATE TABLE IF NOT EXISTS everbus.outbox_relay (
  only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one),
  holder   text    NOT NULL,
  token    bigint  NOT NULL,
  until    bigint  NOT NULL,                    -- microseconds
  since    bigint  NOT NULL                     -- the last row of the outbox when the holder changed
);

-- The outbox with the names of the framework specification.
CREATE OR REPLACE VIEW everbus.event_outbox_framework
  (id, event_type, event_payload, created_at, published_at, correlation_id, trace_id, attempts, last_error) AS
SELECT id, event_type, payload, created_at, CASE WHEN status <> 'pending' THEN sent_at END, correlation_id,
       trace_id, attempts, last_error
FROM everbus.event_outbox;
