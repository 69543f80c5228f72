-- The usual steps of a delivery, each in one call that is its own transaction: new events are claimed, and acks of
-- first attempts are written. Everything else (retries, events without a handler, ordered groups, leases that
-- ended) is done by statements of the engine, in longer transactions.
--
-- Plans are made once per connection, and do not depend on statistics: every table is read through its index. With
-- enable_seqscan off, a relation without an index, such as a sequence, has so high a cost that the server would
-- compile each execution (JIT), which takes 40 ms. Hence jit is off too.
--
-- This file is applied again by each migration that changes a function, so it replaces what is there.

-- Claims new events of a group. The last row of the answer has o_head, the rows before it have the events. o_head is
-- the status, when to look again, and the horizon: decided, newest, pending, server, holders. The status:
--   0: nothing to hand out
--   1: the events are claimed
--   2: the group needs more than this function does; nothing was changed
--   3: the group was removed
-- The last row also has a seq if nothing is left: the group has no other new event, and no writer may still add one
-- before those that were claimed. Engines of earlier versions read only o_head of the last row.
--
-- ours: the types that the consumer handles. unwanted: the types that the group does not want. Other types are
-- not known to the engine, or other consumers handle them. eager: there are probably events for the group, so
-- it is locked at once. Otherwise it is locked only if there are some.
--
-- A claim need not survive a crash of the server, so its commit does not wait for the disk: if the claim is lost, its
-- events are handed out again, and settlements of the old lease are refused. An ack that was answered does survive,
-- and so does its claim, which was written before it.
CREATE OR REPLACE FUNCTION everbus.claim_new(
  of_group bigint, at bigint, for_owner bigint, new_token bigint, lease_until bigint,
  patterns text[], ours integer[], unwanted integer[], archive boolean,
  room bigint, most_bytes bigint, lazy bigint, most_pieces bigint,
  known bigint, pending bigint, holders text[], server text, eager boolean
) RETURNS TABLE (
  seq bigint, id uuid, type integer, version bigint, occurred_at bigint, received_at bigint, attrs text,
  payload bytea, checksum integer, o_head text[]
) LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET jit = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
  g record;
  decided bigint;
  newest bigint;
  now_pending bigint;
  now_holders text[];
  now_server text;
  batch record;
  waiting record;
  next bigint;
  first_wanted bigint;
  wanted boolean := eager;
  special boolean;
  seqs bigint[];
  taken bigint;
  lo bigint;
  hi bigint;
  not_ours int8multirange := '{}';
BEGIN
  -- The horizon reads what is true now. With a snapshot of the start of the call, the log would lack events that
  -- were committed meanwhile, and the cursor would pass them.
  IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
    o_head := '{2}';
    RETURN NEXT;
    RETURN;
  END IF;
  IF eager THEN
    SELECT x.name, x.ordered, x.cursor, x.dropped_to,
      (SELECT CASE WHEN q.is_called THEN q.last_value ELSE 0 END FROM everbus.log_seq q) AS newest,
      (SELECT r.mark FROM everbus.runs r) || ' ' || extract(epoch FROM pg_postmaster_start_time()) AS now_server,
      set_config('synchronous_commit', 'off', true)
    INTO g FROM everbus.groups x WHERE x.id = of_group FOR UPDATE;
    IF g.newest < g.cursor THEN
      -- Read before the wait for the lock, during which another consumer claimed newer events.
      SELECT q.last_value INTO g.newest FROM everbus.log_seq q;
    END IF;
  ELSE
    SELECT x.name, x.ordered, x.cursor, x.dropped_to,
      CASE WHEN q.is_called THEN q.last_value ELSE 0 END AS newest,
      (SELECT r.mark FROM everbus.runs r) || ' ' || extract(epoch FROM pg_postmaster_start_time()) AS now_server
    INTO g FROM everbus.groups x, everbus.log_seq q WHERE x.id = of_group;
  END IF;
  IF g.cursor IS NULL THEN
    o_head := '{3}';
    RETURN NEXT;
    RETURN;
  END IF;
  -- Usually nothing is new, or everything new is committed. Otherwise the horizon asks who may still write.
  IF g.now_server = server AND g.newest >= known AND g.newest <= known + 2000 AND (g.newest = known
    OR g.newest - known = (SELECT count(*) FROM everbus.log l WHERE l.seq > known AND l.seq <= g.newest))
  THEN
    decided := g.newest;
    newest := g.newest;
    now_pending := pending;
    now_holders := holders;
    now_server := server;
  ELSE
    SELECT h.decided, h.newest, h.now_pending, h.now_holders, h.now_server
    INTO decided, newest, now_pending, now_holders, now_server
    FROM everbus.horizon(known, pending, holders, server) h;
  END IF;
  o_head := (ARRAY[NULL, NULL, decided, newest, now_pending]::text[] || now_server) || now_holders;
  -- In another run of the server, ours and unwanted may have other numbers.
  IF newest < g.cursor OR (server <> '' AND now_server IS DISTINCT FROM server) THEN
    o_head[1] := '2';
    RETURN NEXT;
    RETURN;
  END IF;
  IF NOT eager AND decided > g.cursor THEN
    IF decided < g.cursor + lazy THEN
      SELECT l.seq INTO first_wanted FROM everbus.log l
      WHERE l.seq > g.cursor AND NOT (l.type = ANY (unwanted))
        AND CASE WHEN l.address IS NULL THEN true ELSE l.address = g.name OR archive END
      ORDER BY l.seq LIMIT 1;
    END IF;
    wanted := decided >= g.cursor + lazy OR coalesce(first_wanted <= decided, false);
    -- Usually there is nothing to do, and then nothing is locked or written.
    IF wanted THEN
      SELECT x.name, x.ordered, x.cursor, x.dropped_to, set_config('synchronous_commit', 'off', true)
      INTO g FROM everbus.groups x WHERE x.id = of_group FOR UPDATE;
      IF NOT FOUND THEN
        o_head[1] := '3';
        RETURN NEXT;
        RETURN;
      END IF;
    END IF;
  END IF;
  -- Read after the wait for the lock: what the holder before has committed is seen.
  SELECT ARRAY (SELECT s.event_type FROM everbus.subscriptions s WHERE s.group_id = of_group ORDER BY s.name)
      AS patterns,
    (SELECT min(c.until) FROM everbus.claims c WHERE c.group_id = of_group) AS lease_end,
    EXISTS (SELECT 1 FROM everbus.deliveries d WHERE d.group_id = of_group) AS has_rows,
    count(*) AS count, min(l.seq) AS lo, max(l.seq) AS hi, sum(l.size) AS bytes,
    bool_and(l.type = ANY (ours)) AS handled
  INTO batch
  FROM (
    SELECT l.seq, l.type, octet_length(l.payload) AS size FROM everbus.log l
    WHERE wanted AND l.seq > g.cursor AND l.seq <= decided AND NOT (l.type = ANY (unwanted))
      AND CASE WHEN l.address IS NULL THEN true ELSE l.address = g.name OR archive END
    ORDER BY l.seq LIMIT room
  ) l;
  next := batch.lease_end;
  special := g.ordered OR g.dropped_to > g.cursor OR batch.patterns <> patterns OR coalesce(batch.lease_end <= at, false);
  IF batch.has_rows AND NOT special THEN
    SELECT (SELECT min(d.until) FROM everbus.deliveries d WHERE d.group_id = of_group AND d.state = 1) AS lease_end,
      (SELECT min(d.due) FROM everbus.deliveries d WHERE d.group_id = of_group AND d.state = 0) AS due,
      EXISTS (SELECT 1 FROM everbus.deliveries d WHERE d.group_id = of_group AND d.state = 3) AS unhandled,
      EXISTS (SELECT 1 FROM everbus.deliveries d WHERE d.group_id = of_group AND d.seq > g.cursor) AS ahead
    INTO waiting;
    next := least(next, waiting.lease_end, waiting.due);
    special := waiting.unhandled OR waiting.ahead OR coalesce(waiting.lease_end <= at, false)
      OR coalesce(waiting.due <= at, false);
  END IF;
  o_head[2] := next;
  IF special THEN
    o_head[1] := '2';
    RETURN NEXT;
    RETURN;
  END IF;
  IF batch.count = 0 THEN
    IF wanted AND decided >= g.cursor + lazy THEN
      UPDATE everbus.groups x SET cursor = decided WHERE x.id = of_group;
    END IF;
    o_head[1] := '0';
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
        WHERE l.seq > g.cursor AND l.seq <= decided AND NOT (l.type = ANY (unwanted))
          AND CASE WHEN l.address IS NULL THEN true ELSE l.address = g.name OR archive END
        ORDER BY l.seq LIMIT room
      ) l WINDOW w AS (ORDER BY l.seq ROWS UNBOUNDED PRECEDING)
    ) t;
    taken := coalesce(cardinality(seqs), 0);
    lo := seqs[1];
    hi := seqs[taken];
    IF hi - lo + 1 > taken THEN
      SELECT int8multirange(int8range(lo, hi, '[]')) - range_agg(int8range(s, s, '[]')) INTO not_ours
      FROM unnest(seqs) s;
    END IF;
    -- The first event is none for this consumer, or the claim would be a large row.
    IF taken = 0 OR (SELECT count(*) FROM unnest(not_ours)) > most_pieces THEN
      o_head[1] := '2';
      RETURN NEXT;
      RETURN;
    END IF;
  END IF;
  WITH claimed AS (
    INSERT INTO everbus.claims (token, group_id, lo, hi, owner, until, done)
    VALUES (new_token, of_group, lo, hi, for_owner, lease_until, not_ours))
  UPDATE everbus.groups x
  SET cursor = CASE WHEN taken < batch.count OR batch.count >= room THEN hi ELSE decided END,
    active_at = greatest(x.active_at, at)
  WHERE x.id = of_group;
  IF isempty(not_ours) THEN
    RETURN QUERY
    SELECT l.seq, l.id, l.type, l.version, l.occurred_at, l.received_at, l.attrs, l.payload, l.checksum, NULL::text[]
    FROM everbus.log l WHERE l.seq BETWEEN lo AND hi ORDER BY l.seq;
  ELSE
    RETURN QUERY
    SELECT l.seq, l.id, l.type, l.version, l.occurred_at, l.received_at, l.attrs, l.payload, l.checksum, NULL::text[]
    FROM everbus.log l WHERE l.seq BETWEEN lo AND hi AND NOT (not_ours @> l.seq) ORDER BY l.seq;
  END IF;
  o_head[1] := '1';
  IF taken = batch.count AND batch.count < room AND decided = newest THEN
    seq := decided;
  END IF;
  RETURN NEXT;
END
$$;

-- Writes acks of events in claims, and returns the claims whose acks were written. A claim is left alone if its
-- lease has ended, or if not all of these events are in flight. The tokens come in ascending order, as in all
-- settlements, so that two settlements do not deadlock.
CREATE OR REPLACE FUNCTION everbus.ack(tokens bigint[], groups bigint[], acked text[], at bigint, for_owner bigint)
RETURNS bigint[] LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET jit = off
AS $$
#variable_conflict use_column
DECLARE
  mine int8multirange;
  finished boolean;
  written bigint[] := '{}';
BEGIN
  FOR i IN 1..cardinality(tokens) LOOP
    mine := acked[i]::int8multirange;
    -- Usually this finishes the claim.
    DELETE FROM everbus.claims x
    WHERE x.token = tokens[i] AND x.group_id = groups[i] AND x.until > at AND x.owner = for_owner
      AND int8range(x.lo, x.hi, '[]') @> mine AND NOT x.done && mine
      AND x.done + mine @> int8range(x.lo, x.hi, '[]');
    IF NOT FOUND THEN
      UPDATE everbus.claims x SET done = x.done + mine
      WHERE x.token = tokens[i] AND x.group_id = groups[i] AND x.until > at AND x.owner = for_owner
        AND int8range(x.lo, x.hi, '[]') @> mine AND NOT x.done && mine
      RETURNING x.done @> int8range(x.lo, x.hi, '[]') INTO finished;
      CONTINUE WHEN NOT FOUND;
      -- Another transaction has settled the others since.
      IF finished THEN
        DELETE FROM everbus.claims x WHERE x.token = tokens[i];
      END IF;
    END IF;
    written := written || tokens[i];
  END LOOP;
  RETURN written;
END
$$;
