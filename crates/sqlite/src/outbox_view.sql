-- In a user's database the dead letters are those of the outbox alone.
CREATE VIEW IF NOT EXISTS dead_letter_events
  (event_id, event_type, payload, error, errors, attempts, first_seen_at, last_seen_at, retried_at) AS
SELECT event_id, event_type, payload, error, failures, attempts, first_seen_at, last_seen_at, retried_at
FROM outbox_dead_letters;
