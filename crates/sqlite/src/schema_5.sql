-- From schema version 4 to 5: a checksum of every event, and what of a claim may have begun.

-- CRC-32 over the other columns of the row, with the name of its type instead of its number; see checksum.rs.
-- NULL: the row was written before version 5.
ALTER TABLE log ADD COLUMN checksum INTEGER;

-- Events of a claim up to here may have begun, so that a crash counts as an attempt; those beyond it are only
-- reserved. NULL: the claim was made before version 5, and all of it may have begun.
ALTER TABLE claims ADD COLUMN started INTEGER;
