use everbus_macros::Event;

#[derive(Event)]
#[event(type = "orders.order.placed")]
struct OnAField {
    #[event(key)]
    order_id: u64,
}

#[derive(Event)]
enum OnAVariant {
    #[event(type = "orders.order.placed")]
    Placed,
}

#[derive(Event)]
#[event(type = "orders.order.placed", entity = "ORDER")]
struct EntityWithoutField;

#[derive(Event)]
#[event(type = "orders.order.placed", entity("ORDER", "order_id", "more"))]
struct EntityWithMore {
    order_id: u64,
}

fn main() {}
