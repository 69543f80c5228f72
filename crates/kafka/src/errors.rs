//! Errors of the server and of the client, mapped to codes.

use everbus_core::{Code, Error};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Kind};

/// The hint for a cluster that does not take the requests of this client.
pub(crate) const OLDEST: &str =
    "the cluster refuses the version of this client: Kafka 2.3 and newer are supported";

/// The kind of an error of the client, if it has one.
pub(crate) fn kind(error: &KafkaError) -> Option<Kind> {
    match error {
        KafkaError::MessageConsumptionFatal(kind) | KafkaError::AdminOp(kind) => Some(*kind),
        error => error.rdkafka_error_code(),
    }
}

/// The error that the caller sees. `what` says what failed.
pub(crate) fn refused(what: &str, error: &KafkaError) -> Error {
    match kind(error) {
        Some(kind) => of_kind(what, kind),
        None => Error::new(Code::Unavailable, format!("{what}: {error}")),
    }
}

/// Like [`refused`], for an error of which only the kind is known.
pub(crate) fn of_kind(what: &str, kind: Kind) -> Error {
    let text = format!("{what}: {kind}");
    let new = |code: Code, hint: &str| Error::new(code, text.clone()).hint(hint);
    match kind {
        Kind::MessageSizeTooLarge | Kind::InvalidMessageSize | Kind::InvalidRecord => new(
            Code::PayloadTooLarge,
            "let large payloads overflow to an object store, or raise max.message.bytes of the topic",
        ),
        Kind::TopicAuthorizationFailed => new(
            Code::InvalidSetting,
            "the user needs the permissions Read, Write, Describe and Create for this topic",
        ),
        Kind::GroupAuthorizationFailed => new(
            Code::InvalidSetting,
            "the user needs the permissions Read, Describe and Delete for the group",
        ),
        Kind::ClusterAuthorizationFailed | Kind::TransactionalIdAuthorizationFailed => new(
            Code::InvalidSetting,
            "the user needs the permissions Create, Describe and IdempotentWrite for the cluster",
        ),
        Kind::SaslAuthenticationFailed | Kind::Authentication => new(
            Code::InvalidSetting,
            "check user and password: in the URL, or broker.user, broker.password and broker.sasl",
        ),
        Kind::UnsupportedSASLMechanism | Kind::IllegalSASLState => new(
            Code::InvalidSetting,
            "broker.sasl names a mechanism that the server takes: PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512",
        ),
        Kind::SSL => new(
            Code::InvalidSetting,
            "broker.tls.ca names the root certificate of the server",
        ),
        Kind::InvalidSessionTimeout => new(
            Code::InvalidSetting,
            "the server takes sessions between group.min.session.timeout.ms and group.max.session.timeout.ms",
        ),
        Kind::InconsistentGroupProtocol => new(
            Code::InvalidSetting,
            "another program is a member of this consumer group: give the group another name, or end that program",
        ),
        Kind::GroupMaxSizeReached => new(
            Code::InvalidSetting,
            "the group has as many members as group.max.size of the server allows",
        ),
        Kind::BadCompression | Kind::NotImplemented => new(
            Code::Unsupported,
            "records are damaged, or compressed in a way that this build does not read",
        ),
        Kind::UnsupportedVersion | Kind::UnsupportedFeature => new(Code::Unsupported, OLDEST),
        Kind::InvalidReplicationFactor => new(
            Code::InvalidSetting,
            "the cluster has fewer brokers than copies: declare fewer copies, or start more brokers",
        ),
        Kind::PolicyViolation => new(
            Code::InvalidSetting,
            "a policy of the cluster forbids it: create the topic there, or declare what the policy allows",
        ),
        Kind::UnknownTopicOrPartition | Kind::UnknownTopic | Kind::UnknownPartition => new(
            Code::Unavailable,
            "the topic was removed from the server; open the bus again to create it",
        ),
        Kind::NotEnoughReplicas | Kind::NotEnoughReplicasAfterAppend => new(
            Code::Unavailable,
            "fewer copies are in sync than min.insync.replicas asks for",
        ),
        _ => Error::new(Code::Unavailable, text),
    }
}

/// Whether an error of a send says that nothing was stored. Otherwise the record may be in the topic, or may
/// come later.
pub(crate) fn is_refusal(kind: Option<Kind>) -> bool {
    matches!(
        kind,
        Some(
            Kind::MessageSizeTooLarge
                | Kind::InvalidMessageSize
                | Kind::InvalidRecord
                | Kind::TopicAuthorizationFailed
                | Kind::ClusterAuthorizationFailed
                | Kind::SaslAuthenticationFailed
                | Kind::QueueFull
                | Kind::UnknownTopic
                | Kind::UnknownTopicOrPartition
                | Kind::UnknownPartition
                | Kind::InvalidTopic
                | Kind::PolicyViolation
                | Kind::UnsupportedVersion
        )
    )
}

/// Whether the same question may be answered in a moment: the cluster elects a leader, or has not told all its
/// brokers of a new topic.
pub(crate) fn is_passing(error: &KafkaError) -> bool {
    matches!(
        kind(error),
        Some(
            Kind::NotLeaderForPartition
                | Kind::LeaderNotAvailable
                | Kind::ReplicaNotAvailable
                | Kind::CoordinatorNotAvailable
                | Kind::NotCoordinator
                | Kind::CoordinatorLoadInProgress
                | Kind::BrokerTransportFailure
                | Kind::PreferredLeaderNotAvailable
                | Kind::FencedLeaderEpoch
                | Kind::UnknownLeaderEpoch
                | Kind::AllBrokersDown
                | Kind::BrokerNotAvailable
                | Kind::BrokerDestroy
                | Kind::NotController
                | Kind::Unknown
                | Kind::UnknownTopicId
                | Kind::Resolve
                | Kind::OperationTimedOut
                | Kind::RequestTimedOut
                | Kind::MessageTimedOut
                | Kind::WaitingForCoordinator
                | Kind::InProgress
                | Kind::PreviousInProgress
                | Kind::NetworkException
                | Kind::KafkaStorageError
                | Kind::NotEnoughReplicas
                | Kind::OffsetNotAvailable
                | Kind::UnstableOffsetCommit
                | Kind::FetchSessionIdNotFound
                | Kind::InvalidFetchSessionEpoch
                // The member joins its group again by itself.
                | Kind::PollExceeded
                | Kind::AssignmentLost
                | Kind::IllegalGeneration
                | Kind::UnknownMemberId
                | Kind::MemberIdRequired
                | Kind::RebalanceInProgress
                // The member reads from the first record that exists. Missing records are found as a gap.
                | Kind::OffsetOutOfRange
                | Kind::AutoOffsetReset
        )
    )
}

/// Like [`is_passing`], for a question about a topic that exists: a broker that has not heard of it yet says that there
/// is none.
pub(crate) fn is_passing_for_new(error: &KafkaError) -> bool {
    is_passing(error) || kind(error) == Some(Kind::UnknownTopicOrPartition)
}

/// Whether records that were fetched cannot be read.
pub(crate) fn is_damage(error: &KafkaError) -> bool {
    matches!(
        kind(error),
        Some(
            Kind::BadMessage
                | Kind::BadCompression
                | Kind::NotImplemented
                | Kind::InvalidMessage
                | Kind::MessageSizeTooLarge
        )
    )
}
