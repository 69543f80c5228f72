//! Writing to the outbox in a transaction of sqlx.

use everbus_core::{Code, Error, Event, EventId, IntoEvent, Result};
use sqlx::{AssertSqlSafe, PgConnection};

use super::Outbox;
use super::enqueue::{NewRow, insert_sql, no_table, taken};

impl Outbox {
    /// As [`enqueue`](Self::enqueue), in a transaction of sqlx: pass `&mut *tx`.
    ///
    /// ```no_run
    /// # async fn order(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
    /// use everbus_postgres::outbox::Outbox;
    ///
    /// let mut tx = pool.begin().await?;
    /// sqlx::query("INSERT INTO orders (id, total) VALUES (123, 1999)").execute(&mut *tx).await?;
    /// let confirmed = ("order.confirmed", serde_json::json!({ "order_id": 123 }));
    /// Outbox::new().enqueue_sqlx(&mut *tx, confirmed).await?;
    /// tx.commit().await?; // both, or neither
    /// # Ok(())
    /// # }
    /// ```
    pub async fn enqueue_sqlx(
        &self,
        tx: &mut PgConnection,
        event: impl IntoEvent,
    ) -> Result<EventId> {
        let event = event.into_event()?;
        let row = NewRow::of(&event)?;
        // Safe: the only part that is not a constant is the quoted name of the schema. An unnamed prepared statement
        // works through a pooler.
        let insert = sqlx::query(AssertSqlSafe(insert_sql(&self.table())))
            .persistent(false)
            .bind(row.id)
            .bind(row.event_id)
            .bind(row.event_type)
            .bind(row.payload)
            .bind(row.correlation_id)
            .bind(row.trace_id)
            .bind(row.attributes.into_owned())
            .bind(row.ordering_key);
        let inserted = insert.execute(tx).await;
        inserted.map_err(|error| refused(&event, error))?;
        Ok(event.id())
    }
}

fn refused(event: &Event, error: sqlx::Error) -> Error {
    let state = error
        .as_database_error()
        .and_then(sqlx::error::DatabaseError::code);
    match state.as_deref() {
        Some("23505") => taken(event).caused_by(error),
        Some("42P01") => no_table().caused_by(error),
        Some(_) => {
            Error::new(Code::Internal, format!("writing to the outbox: {error}")).caused_by(error)
        }
        None => Error::new(Code::Unavailable, format!("writing to the outbox: {error}"))
            .hint("the connection was lost; roll the transaction back and repeat it")
            .caused_by(error),
    }
}
