-- The tables of the broker. Every name begins with the schema, which a setting may change.
--
-- The log is append-only. For a group, an event is done if it is at or below the group's cursor and no
-- claim, delivery or dead letter says otherwise. Times are microseconds of the clock of the engines.

CREATE TABLE everbus.types (
  id   integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name text COLLATE "C" NOT NULL UNIQUE
);

-- Numbers are given in the order of the calls, not of the commits: see everbus.horizon. A larger cache would
-- give each connection a block of numbers.
CREATE SEQUENCE everbus.log_seq AS bigint CACHE 1;

CREATE TABLE everbus.log (
  seq         bigint PRIMARY KEY DEFAULT nextval('everbus.log_seq'),
  received_at bigint NOT NULL,
  occurred_at bigint NOT NULL,
  expires_at  bigint,                          -- given by the publisher
  type        integer NOT NULL,                -- everbus.types.id
  version     bigint NOT NULL,
  checksum    integer,                         -- CRC-32; see checksum.rs
  id          uuid NOT NULL,
  tenant      text COLLATE "C" NOT NULL,       -- '' for none
  app         text COLLATE "C",
  entity_type text COLLATE "C",
  entity_id   text COLLATE "C",
  address     text COLLATE "C",                -- the one group that gets the event; NULL: all groups
  attrs       text,                            -- JSON of all optional attributes
  payload     bytea NOT NULL
);
-- Attributes may be longer than an entry of an index, so indexes have their hashes.
CREATE UNIQUE INDEX log_id ON everbus.log (id, hashtextextended(tenant, 0));
-- The server does not compress payloads: they are often compressed, encrypted or small. Attributes are read with
-- every row.
ALTER TABLE everbus.log ALTER COLUMN payload SET STORAGE EXTERNAL;
-- The log only grows at its end. Apart from inserts, only retention makes work for vacuum.
ALTER TABLE everbus.log SET (autovacuum_vacuum_insert_scale_factor = 0.1, autovacuum_analyze_scale_factor = 0.05);

CREATE TABLE everbus.groups (
  id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,  -- never reused: leases carry it
  name        text COLLATE "C" NOT NULL UNIQUE,  -- '' is the unnamed group
  ordered     boolean NOT NULL,
  cursor      bigint NOT NULL,                 -- everything up to here was handed out or skipped
  declared_at bigint NOT NULL,                 -- the head of the log when the group was declared
  dropped_to  bigint NOT NULL DEFAULT 0,       -- skips beyond the cursor go up to here
  created_at  bigint NOT NULL,
  active_at   bigint NOT NULL,
  owner       bigint                           -- the owner of an ephemeral group; NULL: the group is durable
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

CREATE TABLE everbus.subscriptions (
  id         uuid PRIMARY KEY,
  event_type text COLLATE "C" NOT NULL,        -- the pattern
  created_at bigint NOT NULL,
  group_id   bigint NOT NULL,
  name       text COLLATE "C" NOT NULL,
  after_seq  bigint NOT NULL,
  UNIQUE (group_id, name)
);

-- A range of the log handed to one owner. Events of the range that are not in done are in flight.
CREATE TABLE everbus.claims (
  token    bigint PRIMARY KEY,                 -- fencing token: random, never used again
  group_id bigint NOT NULL,
  lo       bigint NOT NULL,
  hi       bigint NOT NULL,
  owner    bigint NOT NULL,
  until    bigint NOT NULL,
  done     int8multirange NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX claims_group ON everbus.claims (group_id, lo);

-- Events that neither a cursor nor a claim covers: one row per event and group, for an event that waits or has a
-- lease of its own.
CREATE TABLE everbus.deliveries (
  group_id   bigint NOT NULL,
  seq        bigint NOT NULL,
  state      smallint NOT NULL,                -- 0 waiting, 1 leased, 3 no handler
  due        bigint NOT NULL,                  -- when it may be handed out; state 3: when it is given up
  attempt    integer NOT NULL,                 -- attempts begun
  type       integer NOT NULL,
  key        text COLLATE "C",                 -- the ordering key, in ordered groups
  owner      bigint NOT NULL DEFAULT 0,
  token      bigint NOT NULL DEFAULT 0,
  until      bigint NOT NULL DEFAULT 0,
  suspect    boolean NOT NULL DEFAULT false,   -- was in flight at a crash or when its lease ended
  crashes    integer NOT NULL DEFAULT 0,
  failures   text,                             -- JSON array
  updated_at bigint NOT NULL,
  replayed   boolean NOT NULL DEFAULT false,   -- redelivered on request after the group was done with it
  PRIMARY KEY (group_id, seq)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
CREATE INDEX deliveries_due ON everbus.deliveries (group_id, due, seq) WHERE state = 0;
CREATE INDEX deliveries_leased ON everbus.deliveries (group_id, seq) WHERE state = 1;
CREATE INDEX deliveries_unhandled ON everbus.deliveries (group_id, due, seq) WHERE state = 3;
CREATE INDEX deliveries_unhandled_type ON everbus.deliveries (group_id, type) WHERE state = 3;
CREATE INDEX deliveries_key ON everbus.deliveries (group_id, hashtextextended(key, 0), seq) WHERE key IS NOT NULL;

CREATE TABLE everbus.dead_letters (
  seq           bigint NOT NULL,
  group_id      bigint NOT NULL,
  type          integer NOT NULL,
  attempts      integer NOT NULL,
  failures      text NOT NULL,                 -- JSON array
  handler       text,
  first_seen_at bigint NOT NULL,
  died_at       bigint NOT NULL,
  retried_at    bigint,
  replaced_by   uuid,                          -- the id of the corrected event
  event_id      text NOT NULL,                 -- as the publisher gave it: the foreign id, else the UUID
  PRIMARY KEY (seq, group_id)
);
CREATE INDEX dead_open       ON everbus.dead_letters (seq, group_id)       WHERE retried_at IS NULL;
CREATE INDEX dead_open_group ON everbus.dead_letters (group_id, seq)       WHERE retried_at IS NULL;
CREATE INDEX dead_open_type  ON everbus.dead_letters (type, seq, group_id) WHERE retried_at IS NULL;
CREATE INDEX dead_died       ON everbus.dead_letters (died_at);
CREATE INDEX dead_event      ON everbus.dead_letters USING hash (event_id);

-- Events that a group skipped on purpose, with the reason. A row beyond the cursor of its group means that the group
-- will skip the event.
CREATE TABLE everbus.skips (
  group_id bigint NOT NULL,
  seq      bigint NOT NULL,
  reason   text NOT NULL,
  at       bigint NOT NULL,
  PRIMARY KEY (group_id, seq)
);
CREATE INDEX skips_seq ON everbus.skips (seq);

-- How an event ended in a group after it had failed there. An event that succeeded at its first attempt has no
-- row. Deleted with the event.
CREATE TABLE everbus.outcomes (
  seq      bigint NOT NULL,
  group_id bigint NOT NULL,
  attempts integer NOT NULL,                   -- begun, the last included
  failures text,                               -- JSON array; NULL: no failure since a dead letter was retried
  ended_at bigint NOT NULL,
  took     bigint,                             -- microseconds, of the last attempt
  worker   text,                               -- of the last attempt
  PRIMARY KEY (seq, group_id)
);

-- What each group has handled.
CREATE TABLE everbus.inbox (
  group_id bigint NOT NULL,
  id       uuid NOT NULL,
  tenant   text COLLATE "C" NOT NULL,          -- '' for none
  at       bigint NOT NULL
);
CREATE UNIQUE INDEX inbox_event ON everbus.inbox (group_id, id, hashtextextended(tenant, 0));

-- The engines that consume. An owner is alive while it holds its advisory lock.
CREATE SEQUENCE everbus.owner_seq AS bigint CACHE 1;
CREATE TABLE everbus.owners (
  id         bigint PRIMARY KEY,
  name       text NOT NULL,                    -- the process, for people
  started_at bigint NOT NULL
);

-- Identifies a run of the server. An unlogged table is emptied when the server recovers from a crash and when a
-- standby is promoted. After that, numbers that were given but not committed are given again.
CREATE UNLOGGED TABLE everbus.runs (
  one  boolean PRIMARY KEY DEFAULT true,
  mark uuid NOT NULL DEFAULT gen_random_uuid()
);

-- How far the log is decided: every number up to there is a committed event, or will never be one.
--
-- A writer locks the table before it takes its first number, and holds the lock until it ends. So once all
-- writers that held the lock when `pending` was the newest number have ended, everything up to `pending` is
-- decided. Committed events that follow `known` without a gap are decided anyway.
--
-- What was known in another run of the server is forgotten: numbers may be given again, and prepared transactions
-- have other names.
CREATE FUNCTION everbus.horizon(
  known bigint, pending bigint, holders text[], server text,
  OUT decided bigint, OUT newest bigint, OUT now_pending bigint, OUT now_holders text[], OUT now_server text
) LANGUAGE plpgsql AS $$
DECLARE
  run bigint;
  writers text[];
  found_mark uuid;
BEGIN
  SELECT r.mark INTO found_mark FROM everbus.runs r;
  IF found_mark IS NULL THEN
    INSERT INTO everbus.runs DEFAULT VALUES ON CONFLICT DO NOTHING;
    SELECT r.mark INTO found_mark FROM everbus.runs r;
  END IF;
  now_server := found_mark || ' ' || extract(epoch FROM pg_postmaster_start_time());
  SELECT CASE WHEN is_called THEN last_value ELSE 0 END INTO newest FROM everbus.log_seq;
  IF now_server IS DISTINCT FROM server OR newest < known THEN
    known := 0;
    pending := 0;
    holders := '{}';
  END IF;
  decided := known;
  now_pending := pending;
  now_holders := holders;
  IF newest <= known THEN
    RETURN;
  END IF;
  SELECT max(t.seq) INTO run FROM (
    SELECT l.seq, row_number() OVER (ORDER BY l.seq) AS nth
    FROM everbus.log l WHERE l.seq > known ORDER BY l.seq LIMIT 2000
  ) t WHERE t.seq = known + t.nth;
  decided := coalesce(run, known);
  IF decided >= newest THEN
    RETURN;
  END IF;
  SELECT coalesce(array_agg(l.virtualtransaction), '{}') INTO writers
  FROM pg_catalog.pg_locks l
  WHERE l.locktype = 'relation' AND l.relation = 'everbus.log'::regclass
    AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = current_database())
    AND l.mode = 'RowExclusiveLock' AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid();
  IF cardinality(writers) = 0 THEN
    decided := newest;
    RETURN;
  END IF;
  IF pending > decided AND NOT holders && writers THEN
    decided := pending;
  END IF;
  IF pending > decided THEN
    -- Still waiting for some of the writers of that time.
    SELECT array_agg(h) INTO now_holders FROM unnest(holders) h WHERE h = ANY (writers);
  ELSE
    now_pending := newest;
    now_holders := writers;
  END IF;
END
$$;

-- The first event received at this time or later; NULL if there is none. Times of receipt grow with the
-- numbers, except between concurrent writers, so the place is found by binary search.
CREATE FUNCTION everbus.seq_at(wanted bigint) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
DECLARE
  low bigint;
  high bigint;
  middle bigint;
  at bigint;
  found bigint;
BEGIN
  SELECT min(seq), max(seq) INTO low, high FROM everbus.log;
  IF low IS NULL THEN
    RETURN NULL;
  END IF;
  WHILE low < high LOOP
    middle := low + (high - low) / 2;
    SELECT l.seq, l.received_at INTO found, at FROM everbus.log l WHERE l.seq >= middle ORDER BY l.seq LIMIT 1;
    IF at >= wanted THEN
      high := middle;
    ELSE
      low := found + 1;
    END IF;
  END LOOP;
  RETURN (SELECT min(l.seq) FROM everbus.log l WHERE l.seq >= low - 10000 AND l.seq <= low + 10000 AND l.received_at >= wanted);
END
$$;

-- A payload as text; hexadecimal if it is not UTF-8.
CREATE FUNCTION everbus.as_text(payload bytea) RETURNS text LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
  RETURN convert_from(payload, 'UTF8');
EXCEPTION WHEN OTHERS THEN
  RETURN encode(payload, 'hex');
END
$$;

-- Locks a group, and returns it as it is after the wait: the second statement sees what the previous holder of
-- the lock has committed. Returns no row if there is no such group.
CREATE FUNCTION everbus.lock_group(wanted bigint)
RETURNS TABLE (o_name text, o_ordered boolean, o_cursor bigint, o_dropped_to bigint,
  o_owner bigint, o_patterns text[], o_lease_end bigint, o_unhandled bigint, o_ahead boolean)
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM 1 FROM everbus.groups g WHERE g.id = wanted FOR UPDATE;
  RETURN QUERY
  SELECT g.name, g.ordered, g.cursor, g.dropped_to, g.owner,
    ARRAY (SELECT s.event_type FROM everbus.subscriptions s WHERE s.group_id = wanted ORDER BY s.name),
    least((SELECT min(c.until) FROM everbus.claims c WHERE c.group_id = wanted),
      (SELECT min(d.until) FROM everbus.deliveries d WHERE d.group_id = wanted AND d.state = 1)),
    (SELECT min(d.due) FROM everbus.deliveries d WHERE d.group_id = wanted AND d.state = 3),
    g.dropped_to > g.cursor
      OR EXISTS (SELECT 1 FROM everbus.deliveries d WHERE d.group_id = wanted AND d.seq > g.cursor)
  FROM everbus.groups g WHERE g.id = wanted;
END
$$;

-- The key of the advisory lock that an owner holds.
CREATE FUNCTION everbus.owner_key(owner bigint) RETURNS bigint LANGUAGE sql STABLE AS $$
  SELECT (c.relnamespace::bigint << 32) | owner FROM pg_catalog.pg_class c WHERE c.oid = 'everbus.log'::regclass
$$;

-- The owners that hold no lock.
CREATE FUNCTION everbus.unlocked_owners() RETURNS SETOF bigint LANGUAGE sql AS $$
  SELECT o.id FROM everbus.owners o WHERE NOT EXISTS (
    SELECT 1 FROM pg_catalog.pg_locks l
    WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
      AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = current_database())
      AND l.classid = (SELECT c.relnamespace FROM pg_catalog.pg_class c WHERE c.oid = 'everbus.log'::regclass)
      AND l.objid::bigint = o.id)
$$;
