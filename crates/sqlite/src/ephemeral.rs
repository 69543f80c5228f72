//! Part of the writer: ephemeral groups. They are removed when the owner that declared them ends or is found
//! dead.

use everbus_core::Result;

use crate::declare::remove_group_numbered;
use crate::leases::Leases;
use crate::owner::is_dead;
use crate::rows::to_sql;
use crate::sql::Sql as _;
use crate::tx::Tx;

/// Removes the ephemeral groups of an owner.
pub(crate) fn remove_ephemeral(tx: &mut Tx, leases: &mut Leases, owner: i64) -> Result<()> {
    let groups = tx.groups.iter();
    let theirs = groups.filter(|(_, group)| group.owner == Some(owner));
    let ids: Vec<i64> = theirs.map(|(id, _)| *id).collect();
    ids.into_iter()
        .try_for_each(|id| remove_group_numbered(tx, leases, id))
}

/// Removes the ephemeral groups of owners that are dead.
pub(crate) fn sweep_ephemeral(tx: &mut Tx, leases: &mut Leases) -> Result<()> {
    let owners = tx.groups.values().filter_map(|group| group.owner);
    let mut dead: Vec<i64> = owners.filter(|owner| is_gone(tx, leases, *owner)).collect();
    dead.sort_unstable();
    dead.dedup();
    dead.into_iter()
        .try_for_each(|owner| remove_ephemeral(tx, leases, owner))
}

fn is_gone(tx: &Tx, leases: &Leases, owner: i64) -> bool {
    let mut others = leases.other_owners.iter();
    let known = others.find(|(id, _)| *id == owner);
    owner != leases.owner && known.is_none_or(|(_, lock)| is_dead(&tx.path, lock))
}

/// Moves ephemeral groups past events that were removed before the groups reached them.
pub(crate) fn pass_removed(tx: &mut Tx, hi: u64) -> Result<()> {
    let groups = tx.groups.iter_mut();
    let behind = groups.filter(|(_, group)| group.owner.is_some() && group.cursor < hi);
    for (id, group) in behind {
        tx.conn.run(
            "removing events",
            "UPDATE groups SET cursor = ?2 WHERE id = ?1 AND cursor < ?2",
            (id, to_sql(hi)),
        )?;
        (group.cursor, group.stored_cursor) = (hi, hi);
    }
    Ok(())
}
