use everbus_core::IntoEvent;

struct Underived {
    order_id: u64,
}

fn publish(_event: impl IntoEvent) {}

fn main() {
    publish(Underived { order_id: 42 });
    publish("orders.order.placed");
}
