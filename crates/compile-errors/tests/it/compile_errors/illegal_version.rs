use everbus_macros::Event;

#[derive(Event)]
#[event(type = "orders.order.placed", version = 0)]
struct Zero;

#[derive(Event)]
#[event(type = "orders.order.placed", version = 4294967296)]
struct TooLarge;

#[derive(Event)]
#[event(type = "orders.order.placed", version = "2")]
struct Text;

fn main() {}
