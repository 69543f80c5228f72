-- AUDIT TRAIL. Append-only: only retention may remove records, from the beginning, and leaves an anchor.
CREATE TABLE everbus.audit_log (
  seq            bigint PRIMARY KEY,            -- from 1, without gaps
  at             bigint NOT NULL,               -- microseconds
  actor          text   NOT NULL,
  action         text   NOT NULL,
  entity_type    text,
  entity_id      text,
  tenant         text,
  correlation_id text,
  trace_id       text,
  details        text,                          -- JSON
  hash           bytea  NOT NULL                -- SHA-256 over the hash before it and this row
);
-- Texts may be longer than an entry of an index, so hashes of them are indexed.
CREATE INDEX audit_log_entity ON everbus.audit_log (hashtextextended(entity_id, 0), seq) WHERE entity_id IS NOT NULL;
CREATE INDEX audit_log_actor ON everbus.audit_log (hashtextextended(actor, 0), seq);
CREATE INDEX audit_log_action ON everbus.audit_log (left(action, 64) COLLATE "C", seq);
CREATE INDEX audit_log_at ON everbus.audit_log (at, seq);
CREATE TABLE everbus.audit_anchor (
  only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one),
  seq      bigint NOT NULL,                     -- the last record that retention removed
  hash     bytea  NOT NULL,
  at       bigint NOT NULL
);
-- The end of the chain, kept apart from the records, so that verification notices records that were cut off. Writers
-- lock its row.
CREATE TABLE everbus.audit_head (
  only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one),
  seq      bigint NOT NULL,
  hash     bytea  NOT NULL,
  at       bigint NOT NULL
);
INSERT INTO everbus.audit_head (seq, hash, at) VALUES (0, decode(repeat('00', 32), 'hex'), -9223372036854775808);

CREATE FUNCTION everbus.audit_log_only_grows() RETURNS trigger
LANGUAGE plpgsql AS $everbus$
BEGIN
  IF TG_OP = 'DELETE' THEN
    IF OLD.seq <= coalesce((SELECT seq FROM everbus.audit_anchor), 0) THEN
      RETURN OLD;
    END IF;
    RAISE EXCEPTION 'the audit trail is append-only: only retention removes records' USING ERRCODE = '23514';
  ELSIF TG_OP = 'INSERT' THEN
    IF NEW.seq = 1 + (SELECT seq FROM everbus.audit_head) THEN
      RETURN NEW;
    END IF;
    RAISE EXCEPTION 'the audit trail is append-only: a record is added at the end' USING ERRCODE = '23514';
  END IF;
  RAISE EXCEPTION 'the audit trail is append-only: records are never changed' USING ERRCODE = '23514';
END
$everbus$;
CREATE FUNCTION everbus.audit_anchor_moves_on() RETURNS trigger
LANGUAGE plpgsql AS $everbus$
BEGIN
  IF TG_OP IN ('INSERT', 'UPDATE') THEN
    IF NEW.hash = (SELECT hash FROM everbus.audit_log WHERE seq = NEW.seq) THEN
      IF TG_OP = 'INSERT' THEN
        RETURN NEW;
      ELSIF NEW.seq > OLD.seq THEN
        RETURN NEW;
      END IF;
    END IF;
  END IF;
  RAISE EXCEPTION 'the anchor of the audit trail only moves on, to a record of it' USING ERRCODE = '23514';
END
$everbus$;
CREATE FUNCTION everbus.audit_head_moves_on() RETURNS trigger
LANGUAGE plpgsql AS $everbus$
BEGIN
  IF TG_OP = 'UPDATE' THEN
    IF NEW.seq = OLD.seq + 1 AND NEW.hash = (SELECT hash FROM everbus.audit_log WHERE seq = NEW.seq) THEN
      RETURN NEW;
    END IF;
  END IF;
  RAISE EXCEPTION 'the head of the audit trail only moves on, to its last record' USING ERRCODE = '23514';
END
$everbus$;
CREATE TRIGGER audit_log_only_grows BEFORE INSERT OR UPDATE OR DELETE ON everbus.audit_log
FOR EACH ROW EXECUTE FUNCTION everbus.audit_log_only_grows();
CREATE TRIGGER audit_log_no_truncate BEFORE TRUNCATE ON everbus.audit_log
FOR EACH STATEMENT EXECUTE FUNCTION everbus.audit_log_only_grows();
CREATE TRIGGER audit_anchor_moves_on BEFORE INSERT OR UPDATE OR DELETE ON everbus.audit_anchor
FOR EACH ROW EXECUTE FUNCTION everbus.audit_anchor_moves_on();
CREATE TRIGGER audit_anchor_no_truncate BEFORE TRUNCATE ON everbus.audit_anchor
FOR EACH STATEMENT EXECUTE FUNCTION everbus.audit_anchor_moves_on();
CREATE TRIGGER audit_head_moves_on BEFORE INSERT OR UPDATE OR DELETE ON everbus.audit_head
FOR EACH ROW EXECUTE FUNCTION everbus.audit_head_moves_on();
CREATE TRIGGER audit_head_no_truncate BEFORE TRUNCATE ON everbus.audit_head
FOR EACH STATEMENT EXECUTE FUNCTION everbus.audit_head_moves_on();
