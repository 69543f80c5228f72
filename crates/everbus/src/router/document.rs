//! The AsyncAPI document of a router.
