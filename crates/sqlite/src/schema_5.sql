-- From schema version 4 to 5: what a store keeps of events that another broker moves.

-- The failed attempts of an event in a group, while the broker has it, and after. Deleted with the event.
CREATE TABLE everbus_failures (
  seq      INTEGER NOT NULL,                  -- the event in the log
  group_id INTEGER NOT NULL REFERENCES groups (id),
  failures TEXT,                              -- JSON array, those of runs that are over first
  past     INTEGER NOT NULL,                  -- so many of them belong to runs that are over
  PRIMARY KEY (seq, group_id)
) WITHOUT ROWID;

-- Payload stages of events that are not in the log yet. They move to event_payloads with the event.
CREATE TABLE everbus_early_payloads (
  id                      INTEGER PRIMARY KEY,
  event                   BLOB    NOT NULL,   -- the sixteen bytes of the UUID
  tenant                  TEXT    NOT NULL,   -- '' for none
  event_id                TEXT    NOT NULL,   -- the columns of event_payloads
  stage                   TEXT    NOT NULL,
  payload_compressed      BLOB    NOT NULL,
  payload_size_original   INTEGER NOT NULL,
  payload_size_compressed INTEGER NOT NULL,
  timestamp               INTEGER NOT NULL,
  status_code             INTEGER,
  error_details           TEXT,
  contains_media          INTEGER NOT NULL DEFAULT 0,
  contains_base64         INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX everbus_early_payloads_event ON everbus_early_payloads (event, tenant);
CREATE INDEX everbus_early_payloads_timestamp ON everbus_early_payloads (timestamp);
