//! Part of the writer: ephemeral groups. They are removed when the owner that declared them ends or is found
//! dead.

use everbus_core::Result;

use crate::errors::from_sqlite;
use crate::owner::is_dead;
use crate::rows::to_sql;
use crate::writer::Writer;

impl Writer {
    /// Removes the ephemeral groups of an owner.
    pub(crate) fn remove_ephemeral(&mut self, owner: i64) -> Result<()> {
        let groups = self.state.groups.iter();
        let theirs = groups.filter(|(_, group)| group.owner == Some(owner));
        let ids: Vec<i64> = theirs.map(|(id, _)| *id).collect();
        ids.into_iter()
            .try_for_each(|id| self.remove_group_numbered(id))
    }

    /// Removes the ephemeral groups of owners that are dead.
    pub(crate) fn sweep_ephemeral(&mut self) -> Result<()> {
        let owners = self.state.groups.values().filter_map(|group| group.owner);
        let mut dead: Vec<i64> = owners.filter(|owner| self.is_gone(*owner)).collect();
        dead.sort_unstable();
        dead.dedup();
        dead.into_iter()
            .try_for_each(|owner| self.remove_ephemeral(owner))
    }

    fn is_gone(&self, owner: i64) -> bool {
        let mut others = self.state.other_owners.iter();
        let known = others.find(|(id, _)| *id == owner);
        owner != self.state.owner && known.is_none_or(|(_, lock)| is_dead(&self.path, lock))
    }

    /// Moves ephemeral groups past events that were removed before the groups reached them.
    pub(crate) fn pass_removed(&mut self, hi: u64) -> Result<()> {
        let groups = self.state.groups.iter_mut();
        let behind = groups.filter(|(_, group)| group.owner.is_some() && group.cursor < hi);
        for (id, group) in behind {
            self.conn
                .prepare_cached("UPDATE groups SET cursor = ?2 WHERE id = ?1 AND cursor < ?2")
                .and_then(|mut s| s.execute((id, to_sql(hi))))
                .map_err(|e| from_sqlite("removing events", e))?;
            (group.cursor, group.stored_cursor) = (hi, hi);
        }
        Ok(())
    }
}
