use everbus_macros::Event;

#[derive(Event)]
#[event(type = "orders.order.placed", verson = 2)]
struct Slip;

#[derive(Event)]
#[event(typ = "orders.order.placed")]
struct AnotherSlip;

#[derive(Event)]
#[event(type = "orders.order.placed", colour = "red")]
struct NothingLikeIt;

#[derive(Event)]
#[event(type = "orders.order.placed", type = "orders.order.paid")]
struct Twice;

fn main() {}
