-- The usual ways of a delivery, each in one call that is its own transaction: new events are claimed, and acks of
-- first attempts are written. Everything else (retries, events without a handler, ordered groups, leases that
-- ended) is done by statements of the engine, in longer transactions.
--
-- The plans are made once per connection, whatever the statistics say: every table is read through its index. What has
-- no index, such as a sequence, then seems so dear that the server would compile each execution of it, for 40 ms.
--
-- This file is applied again by each migration that changes a function, so it replaces what is there.

-- Claims new events of a group. The first row of the answer has the columns that begin with o_, the others
-- have the events. o_status:
--   0: nothing to hand out
--   1: the events that follow are claimed
--   2: the group needs more than this function does; nothing was changed
--   3: the group was removed
--
-- ours: the types that the consumer handles. unwanted: the types that the group does not want. Other types are
-- not known to the engine, or other consumers handle them.
--
-- A claim need not survive a crash of the server, so that its commit does not wait for the disk: without it the
-- events are handed out again, and who holds the lease is refused. An ack that was answered does survive, and the
-- claim with it, which was written before.
CREATE OR REPLACE FUNCTION everbus.claim_new(
  of_group bigint, at bigint, for_owner bigint, new_token bigint, lease_until bigint,
  patterns text[], ours integer[], unwanted integer[], archive boolean,
  room bigint, most_bytes bigint, lazy bigint, most_pieces bigint,
  known bigint, pending bigint, holders text[], server text
) RETURNS TABLE (
  seq bigint, id uuid, type integer, version bigint, occurred_at bigint, received_at bigint, attrs text,
  payload bytea, checksum integer,
  o_status smallint, o_next bigint, o_decided bigint, o_newest bigint, o_pending bigint, o_holders text[],
  o_server text
) LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET jit = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
  g record;
  around record;
  batch record;
  first_wanted bigint;
  wanted boolean := false;
  seqs bigint[];
  taken bigint;
  lo bigint;
  hi bigint;
  not_ours int8multirange := '{}';
BEGIN
  -- The horizon reads what is true now. With a snapshot of the start of the call, the log would lack events that
  -- were committed meanwhile, and the cursor would pass them.
  IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
    o_status := 2;
    RETURN NEXT;
    RETURN;
  END IF;
  SELECT x.name, x.ordered, x.cursor, x.dropped_to,
    CASE WHEN q.is_called THEN q.last_value ELSE 0 END AS newest,
    (SELECT r.mark FROM everbus.runs r) || ' ' || extract(epoch FROM pg_postmaster_start_time()) AS now_server
  INTO g FROM everbus.groups x, everbus.log_seq q WHERE x.id = of_group;
  IF NOT FOUND THEN
    o_status := 3;
    RETURN NEXT;
    RETURN;
  END IF;
  -- Usually nothing is new, or everything new is committed. Otherwise the horizon asks who may still write.
  IF g.now_server = server AND g.newest >= known AND g.newest <= known + 2000 AND (g.newest = known
    OR g.newest - known = (SELECT count(*) FROM everbus.log l WHERE l.seq > known AND l.seq <= g.newest))
  THEN
    o_decided := g.newest;
    o_newest := g.newest;
    o_pending := pending;
    o_holders := holders;
    o_server := server;
  ELSE
    SELECT h.decided, h.newest, h.now_pending, h.now_holders, h.now_server
    INTO o_decided, o_newest, o_pending, o_holders, o_server
    FROM everbus.horizon(known, pending, holders, server) h;
  END IF;
  -- In another run of the server, ours and unwanted may have other numbers.
  IF o_newest < g.cursor OR (server <> '' AND o_server IS DISTINCT FROM server) THEN
    o_status := 2;
    RETURN NEXT;
    RETURN;
  END IF;
  IF o_decided >= g.cursor + lazy OR (o_decided > g.cursor AND unwanted = '{}') THEN
    wanted := true;
  ELSIF o_decided > g.cursor THEN
    SELECT l.seq INTO first_wanted FROM everbus.log l
    WHERE l.seq > g.cursor AND NOT (l.type = ANY (unwanted))
      AND CASE WHEN l.address IS NULL THEN true ELSE l.address = g.name OR archive END
    ORDER BY l.seq LIMIT 1;
    wanted := coalesce(first_wanted <= o_decided, false);
  END IF;
  -- Usually there is nothing to do, and then nothing is locked or written.
  IF wanted THEN
    PERFORM set_config('synchronous_commit', 'off', true);
    SELECT x.name, x.ordered, x.cursor, x.dropped_to INTO g FROM everbus.groups x WHERE x.id = of_group FOR UPDATE;
    IF NOT FOUND THEN
      o_status := 3;
      RETURN NEXT;
      RETURN;
    END IF;
  END IF;
  -- Read after the wait for the lock: what the holder before has committed is seen.
  SELECT ARRAY (SELECT s.event_type FROM everbus.subscriptions s WHERE s.group_id = of_group ORDER BY s.name)
      AS patterns,
    (SELECT min(c.until) FROM everbus.claims c WHERE c.group_id = of_group) AS lease_end,
    EXISTS (SELECT 1 FROM everbus.deliveries d WHERE d.group_id = of_group) AS has_rows
  INTO around;
  o_next := around.lease_end;
  o_status := 0;
  IF g.ordered OR g.dropped_to > g.cursor OR around.patterns <> patterns OR around.lease_end <= at THEN
    o_status := 2;
  ELSIF around.has_rows THEN
    SELECT (SELECT min(d.until) FROM everbus.deliveries d WHERE d.group_id = of_group AND d.state = 1) AS lease_end,
      (SELECT min(d.due) FROM everbus.deliveries d WHERE d.group_id = of_group AND d.state = 0) AS due,
      EXISTS (SELECT 1 FROM everbus.deliveries d WHERE d.group_id = of_group AND d.state = 3) AS unhandled,
      EXISTS (SELECT 1 FROM everbus.deliveries d WHERE d.group_id = of_group AND d.seq > g.cursor) AS ahead
    INTO around;
    o_next := least(o_next, around.lease_end, around.due);
    IF around.unhandled OR around.ahead OR around.lease_end <= at OR around.due <= at THEN
      o_status := 2;
    END IF;
  END IF;
  IF o_status <> 0 OR NOT wanted OR o_decided <= g.cursor THEN
    RETURN NEXT;
    RETURN;
  END IF;

  SELECT count(*) AS count, min(l.seq) AS lo, max(l.seq) AS hi, sum(l.size) AS bytes,
    bool_and(l.type = ANY (ours)) AS handled
  INTO batch
  FROM (
    SELECT l.seq, l.type, octet_length(l.payload) AS size FROM everbus.log l
    WHERE l.seq > g.cursor AND NOT (l.type = ANY (unwanted))
      AND CASE WHEN l.address IS NULL THEN true ELSE l.address = g.name OR archive END
    ORDER BY l.seq LIMIT room
  ) l WHERE l.seq <= o_decided;
  IF batch.count = 0 THEN
    IF o_decided >= g.cursor + lazy THEN
      UPDATE everbus.groups x SET cursor = o_decided WHERE x.id = of_group;
    END IF;
    RETURN NEXT;
    RETURN;
  END IF;
  IF batch.handled AND batch.bytes <= most_bytes AND batch.hi - batch.lo + 1 = batch.count THEN
    -- All of them, without a hole.
    taken := batch.count;
    lo := batch.lo;
    hi := batch.hi;
  ELSE
    SELECT array_agg(t.seq ORDER BY t.seq) FILTER (WHERE t.before < most_bytes AND t.handled) INTO seqs
    FROM (
      SELECT l.seq, sum(l.size) OVER w - l.size AS before, bool_and(l.type = ANY (ours)) OVER w AS handled
      FROM (
        SELECT l.seq, l.type, octet_length(l.payload) AS size FROM everbus.log l
        WHERE l.seq > g.cursor AND NOT (l.type = ANY (unwanted))
          AND CASE WHEN l.address IS NULL THEN true ELSE l.address = g.name OR archive END
        ORDER BY l.seq LIMIT room
      ) l WINDOW w AS (ORDER BY l.seq ROWS UNBOUNDED PRECEDING)
    ) t WHERE t.seq <= o_decided;
    taken := coalesce(cardinality(seqs), 0);
    lo := seqs[1];
    hi := seqs[taken];
    IF hi - lo + 1 > taken THEN
      SELECT int8multirange(int8range(lo, hi, '[]')) - range_agg(int8range(s, s, '[]')) INTO not_ours
      FROM unnest(seqs) s;
    END IF;
    -- The first event is none for this consumer, or the claim would be a large row.
    IF taken = 0 OR (SELECT count(*) FROM unnest(not_ours)) > most_pieces THEN
      o_status := 2;
      RETURN NEXT;
      RETURN;
    END IF;
  END IF;
  INSERT INTO everbus.claims (token, group_id, lo, hi, owner, until, done)
  VALUES (new_token, of_group, lo, hi, for_owner, lease_until, not_ours);
  UPDATE everbus.groups x
  SET cursor = CASE WHEN taken < batch.count OR batch.count >= room THEN hi ELSE o_decided END,
    active_at = greatest(x.active_at, at)
  WHERE x.id = of_group;
  o_status := 1;
  RETURN NEXT;
  IF isempty(not_ours) THEN
    RETURN QUERY
    SELECT l.seq, l.id, l.type, l.version, l.occurred_at, l.received_at, l.attrs, l.payload, l.checksum,
      NULL::smallint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::text[], NULL::text
    FROM everbus.log l WHERE l.seq BETWEEN lo AND hi ORDER BY l.seq;
  ELSE
    RETURN QUERY
    SELECT l.seq, l.id, l.type, l.version, l.occurred_at, l.received_at, l.attrs, l.payload, l.checksum,
      NULL::smallint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::text[], NULL::text
    FROM everbus.log l
    WHERE l.seq BETWEEN lo AND hi AND NOT (not_ours @> l.seq)
    ORDER BY l.seq;
  END IF;
END
$$;

-- Writes acks of events in claims, and returns the claims whose acks were written. A claim is left alone if its
-- lease has ended, or if not all of its events are in flight. Tokens come in order, as everywhere.
CREATE OR REPLACE FUNCTION everbus.ack(tokens bigint[], groups bigint[], acked text[], at bigint, for_owner bigint)
RETURNS bigint[] LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET jit = off
AS $$
#variable_conflict use_column
DECLARE
  c record;
  mine int8multirange;
  written bigint[] := '{}';
BEGIN
  FOR i IN 1..cardinality(tokens) LOOP
    SELECT x.done, int8range(x.lo, x.hi, '[]') AS whole INTO c FROM everbus.claims x
    WHERE x.token = tokens[i] AND x.group_id = groups[i] AND x.until > at AND x.owner = for_owner
    FOR UPDATE;
    CONTINUE WHEN NOT FOUND;
    mine := acked[i]::int8multirange;
    CONTINUE WHEN c.done && mine OR NOT (c.whole @> mine);
    IF c.done + mine @> c.whole THEN
      DELETE FROM everbus.claims x WHERE x.token = tokens[i];
    ELSE
      UPDATE everbus.claims x SET done = c.done + mine WHERE x.token = tokens[i];
    END IF;
    written := written || tokens[i];
  END LOOP;
  RETURN written;
END
$$;
