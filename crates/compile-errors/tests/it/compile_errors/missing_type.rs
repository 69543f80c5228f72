use everbus_macros::Event;

#[derive(Event)]
struct WithoutAttribute {
    order_id: u64,
}

#[derive(Event)]
#[event(version = 2)]
struct WithoutType {
    order_id: u64,
}

#[derive(Event)]
#[event]
struct WithoutAnything;

fn main() {}
