-- In a user's schema the dead letters are those of the outbox alone.
CREATE OR REPLACE VIEW everbus.dead_letter_events
  (event_id, event_type, payload, error, errors, attempts, first_seen_at, last_seen_at, retried_at) AS
SELECT event_id, event_type, payload, error, failures, attempts, first_seen_at, last_seen_at, retried_at
FROM everbus.outbox_dead_letters;
