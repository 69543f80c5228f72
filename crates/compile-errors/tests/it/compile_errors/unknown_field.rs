use everbus_macros::Event;

#[derive(Event)]
#[event(type = "orders.order.placed", key = "oder_id")]
struct Slip {
    order_id: u64,
}

#[derive(Event)]
#[event(type = "orders.order.placed", tenant = "shop")]
struct NothingLikeIt {
    order_id: u64,
    total: u64,
}

#[derive(Event)]
#[event(type = "orders.order.placed", entity("ORDER", "id"))]
struct NoFields {}

#[derive(Event)]
#[event(type = "orders.order.placed", key = "0")]
struct Tuple(u64);

#[derive(Event)]
#[event(type = "orders.order.placed", key = "order_id")]
enum Variants {
    Placed { order_id: u64 },
}

fn main() {}
