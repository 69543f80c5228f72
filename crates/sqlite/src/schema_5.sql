-- From schema version 4 to 5: a checksum of every event.

-- CRC-32 over the other columns of the row, with the name of its type instead of its number; see checksum.rs.
-- NULL: the row was written before version 5.
ALTER TABLE log ADD COLUMN checksum INTEGER;
