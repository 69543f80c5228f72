use everbus_macros::Event;

#[derive(Event)]
#[event(type = "")]
struct Empty;

#[derive(Event)]
#[event(type = "orders.*")]
struct Star;

#[derive(Event)]
#[event(type = "orders.>", version = 2)]
struct Rest;

#[derive(Event)]
#[event(type = "orders.order\nplaced")]
struct Unprintable;

#[derive(Event)]
#[event(type = 42)]
struct NotText;

fn main() {}
