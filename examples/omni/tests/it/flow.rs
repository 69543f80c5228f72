//! What happens to messages.

use everbus::payloads::Stage;
use std::time::{Duration, Instant};

use everbus::{DeadLetterFilter, Payload, State};
use omni::events::{
    AgentConfig, AgentRequest, AgentResponse, ContentType, IdentityMerged, IdentityResolved,
    IdentityUpdated, MediaAttachment, MediaFailed, MediaProcessed, MediaProcessing, MediaReceived,
    MediaType, MergeReason, MessageContent, MessageReceived, MessageSending, MessageSent,
    ProcessorType, Recipient, SentStatus,
};
use omni::{identity, intake, sessions};
use serde_json::{Value, json};

use crate::support::{System, message};

const DEADLINE: Duration = Duration::from_secs(60);

// conformance: omni/example-identity: the identity handler resolves the sender of each message, and a repeated webhook and a restart make no second person
#[tokio::test]
async fn a_sender_becomes_a_person() {
    for system in System::everywhere().await {
        check_sender(system).await;
    }
}

async fn check_sender(mut system: System) {
    let bus = &system.app.bus;
    let first = message(1, "whatsapp", "+49", &Value::Null);
    let receipt = intake::receive(bus, first.clone()).await.unwrap();
    let again = intake::receive(bus, first).await.unwrap();
    assert_eq!(receipt.id(), again.id(), "the webhook was called twice");
    let resolved: Vec<IdentityResolved> = system.published(1).await;
    let IdentityResolved {
        message_id,
        person_id,
        identity_id,
        is_new_person,
        is_new_identity,
        confidence,
        ..
    } = resolved[0].clone();
    assert_eq!(message_id.as_deref(), Some("m1"));
    assert!(is_new_person && is_new_identity);
    assert!((confidence - 1.0).abs() < f64::EPSILON);
    let event = &system.records("identity.resolved", 1).await[0].event;
    let attributes = event.attributes().unwrap();
    assert_eq!(attributes.source.as_deref(), Some("omni"));
    let cause = receipt.id().to_string();
    assert_eq!(attributes.causation_id, Some(cause));

    system.restart().await;
    let second = message(2, "whatsapp", "+49", &Value::Null);
    intake::receive(&system.app.bus, second).await.unwrap();
    let resolved: Vec<IdentityResolved> = system.published(2).await;
    assert_eq!(resolved[1].person_id, person_id);
    assert_eq!(resolved[1].identity_id, identity_id);
    assert!(!resolved[1].is_new_person && !resolved[1].is_new_identity);
    assert_eq!(system.app.identities.count().await.unwrap(), (1, 1));

    // For the same message the service gives the same answer again.
    let request = identity::Resolve {
        message_id: "m1".to_owned(),
        channel: "whatsapp".into(),
        platform_user_id: "+49".to_owned(),
        username: None,
        profile: serde_json::Map::new(),
    };
    let repeated = system.app.identities.resolve(request).await.unwrap();
    assert!(repeated.resolved.is_new_person);
}

// conformance: omni/example-merge: accounts with a phone number or address in common are one person, with a confidence; persons are merged
#[tokio::test]
async fn accounts_with_something_in_common_are_one_person() {
    for system in System::everywhere().await {
        check_accounts(system).await;
    }
}

async fn check_accounts(system: System) {
    let send =
        |n, channel, user, profile: &Value| resolved(&system, message(n, channel, user, profile));
    let ada = send(1, "whatsapp", "+49", &json!({ "phone": "+49" })).await;
    let same = send(2, "telegram", "@ada", &json!({ "phone": "+49" })).await;
    assert_eq!(same.person_id, ada.person_id);
    assert!(same.is_new_identity && !same.is_new_person);
    assert!((same.confidence - 0.9).abs() < f64::EPSILON);

    // A new person on a third channel, who then turns out to have the same address.
    let other = send(3, "discord", "ada#1", &json!({ "email": "ada@x.org" })).await;
    assert!(other.is_new_person);
    let known = send(4, "whatsapp", "+49", &json!({ "email": "ada@x.org" })).await;
    assert_eq!(known.person_id, ada.person_id, "the older person stays");
    let updated: Vec<IdentityUpdated> = system.published(1).await;
    assert_eq!(updated[0].changes.len(), 1);
    assert_eq!(updated[0].changes[0].field, "email");
    assert_eq!(updated[0].changes[0].old_value, Value::Null);
    let merged: Vec<IdentityMerged> = system.published(1).await;
    assert_eq!(merged[0].reason, MergeReason::SameEmail);
    assert_eq!(merged[0].target_person_id, ada.person_id);
    assert_eq!(merged[0].source_person_id, other.person_id);
    assert_eq!(
        merged[0].merged_identity_ids,
        std::slice::from_ref(&other.identity_id)
    );
    assert_eq!(merged[0].merged_by.as_deref(), Some("system"));
    assert_eq!(
        merged[0].evidence.as_ref().unwrap()["email"],
        json!("ada@x.org")
    );

    let stranger = send(5, "slack", "U1", &Value::Null).await;
    let service = &system.app.identities;
    let linked = identity::link(service, &other.person_id, &stranger.person_id, "admin-1");
    let linked = linked.await.unwrap().unwrap();
    assert_eq!(linked.target_person_id, ada.person_id, "who stayed before");
    assert_eq!(linked.reason, MergeReason::AdminLinked);
    let again = identity::link(service, &ada.person_id, &stranger.person_id, "admin-1");
    assert_eq!(again.await.unwrap(), None);
    assert_eq!(service.count().await.unwrap(), (1, 4));
}

/// Sends the next message, and waits until its sender is known.
async fn resolved(system: &System, message: MessageReceived) -> IdentityResolved {
    let mine = message.message_id.clone();
    let count = mine.trim_start_matches('m').parse().unwrap();
    intake::receive(&system.app.bus, message).await.unwrap();
    let all: Vec<IdentityResolved> = system.published(count).await;
    let of_mine = |r: &IdentityResolved| r.message_id.as_deref() == Some(&mine);
    all.into_iter().find(of_mine).unwrap()
}

fn file(id: &str, kind: MediaType, url: &str) -> MediaAttachment {
    MediaAttachment {
        media_id: id.to_owned(),
        media_type: kind,
        mime_type: "application/octet-stream".to_owned(),
        size: Some(1000),
        url: Some(url.to_owned()),
        duration: None,
        dimensions: None,
        filename: None,
        caption: None,
    }
}

// conformance: omni/example-media: the media handler says processing, processed, and failed with the retry
#[tokio::test]
async fn a_file_is_processed_and_retried() {
    for system in System::everywhere().await {
        check_processed(system).await;
    }
}

async fn check_processed(system: System) {
    let mut message = message(1, "whatsapp", "+49", &Value::Null);
    message.content.content_type = ContentType::Audio;
    message.content.media = Some(vec![
        file("voice", MediaType::Audio, "https://x.org/flaky-2.ogg"),
        file("paper", MediaType::Document, "https://x.org/a.pdf"),
    ]);
    intake::receive(&system.app.bus, message).await.unwrap();
    let announced: Vec<MediaReceived> = system.published(2).await;
    assert_eq!(announced[0].size, Some(1000));
    let processed: Vec<MediaProcessed> = system.published(2).await;
    let of = |id: &str| processed.iter().find(|p| p.media_id == id).unwrap();
    assert_eq!(of("voice").message_id, "m1");
    assert_eq!(of("voice").result.content, "transcription of voice");
    assert_eq!(of("paper").result.processor_type, ProcessorType::Extraction);
    // Two attempts failed, and each said that another would follow.
    let failed: Vec<MediaFailed> = system.published(2).await;
    let mut counts: Vec<u32> = failed.iter().map(|f| f.retry_count).collect();
    counts.sort_unstable();
    assert_eq!(counts, [0, 1]);
    assert!(failed.iter().all(|f| f.will_retry && f.media_id == "voice"));
    let began: Vec<MediaProcessing> = system.published(4).await;
    let voice = began.iter().filter(|b| b.media_id == "voice");
    assert_eq!(voice.count(), 3, "one for each attempt");
    let received = system.records("media.received", 2).await;
    let voice = received
        .iter()
        .find(|r| r.event.typed::<MediaReceived>().unwrap().media_id == "voice");
    let stages = system.app.bus.payloads();
    let stages = stages.get_stage(voice.unwrap().event.id(), Stage::ERROR);
    assert_eq!(stages.await.unwrap().len(), 2);
}

#[tokio::test]
async fn a_file_that_cannot_be_read_becomes_a_dead_letter() {
    for system in System::everywhere().await {
        check_unreadable(system).await;
    }
}

async fn check_unreadable(system: System) {
    let mut message = message(1, "whatsapp", "+49", &Value::Null);
    message.content.media = Some(vec![file(
        "picture",
        MediaType::Image,
        "https://x.org/broken.png",
    )]);
    intake::receive(&system.app.bus, message).await.unwrap();
    let failed: Vec<MediaFailed> = system.published(1).await;
    assert!(!failed[0].will_retry);
    let letters = system.app.bus.dead_letters();
    // On an engine where event and dead letter are two steps, the event may be visible before the dead letter.
    let give_up = Instant::now() + DEADLINE;
    while letters.count(DeadLetterFilter::default()).await.unwrap() == 0 {
        assert!(Instant::now() < give_up, "there is no dead letter");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let letter = &letters.list().await.unwrap()[0];
    assert_eq!(letter.group.as_str(), "media-processor");
    assert!(letter.last_error().contains("broken.png"));
}

// conformance: omni/example-stages: payload stages are written on the way
#[tokio::test]
async fn what_was_asked_answered_and_sent_is_kept() {
    for system in System::everywhere().await {
        check_stages(system).await;
    }
}

async fn check_stages(system: System) {
    let bus = &system.app.bus;
    let received = message(1, "whatsapp", "+49", &Value::Null);
    let received = intake::receive(bus, received).await.unwrap();
    let request = AgentRequest {
        message_id: "m1".to_owned(),
        person_id: "p1".to_owned(),
        instance_id: "i1".to_owned(),
        enriched_content: "Hello".to_owned(),
        history: None,
        agent_config: AgentConfig {
            api_url: "https://agent.example".to_owned(),
            timeout: 30_000,
            streaming: false,
        },
    };
    let request = bus.publish(request).await.unwrap();
    let answered: Vec<AgentResponse> = system.published(1).await;
    let text = answered[0].response.text.as_deref();
    assert_eq!(text, Some("You said: Hello"));
    let sending = MessageSending {
        message_id: "m2".to_owned(),
        instance_id: "i1".to_owned(),
        channel: "whatsapp".into(),
        recipient: Recipient {
            platform_user_id: "+49".to_owned(),
            conversation_id: None,
        },
        content: MessageContent::text("Hi"),
        reply_to: Some("m1".to_owned()),
    };
    let sending = bus.publish(sending).await.unwrap();
    let sent: Vec<MessageSent> = system.published(1).await;
    assert_eq!(sent[0].status, SentStatus::Sent);
    for (event, expected) in [
        (received.id(), &[Stage::WEBHOOK_RAW][..]),
        (request.id(), &[Stage::AGENT_REQUEST, Stage::AGENT_RESPONSE]),
        (sending.id(), &[Stage::CHANNEL_SEND]),
    ] {
        let stages = bus.payloads().get(event).await.unwrap();
        let names: Vec<&str> = stages.iter().map(|s| s.info.stage.as_str()).collect();
        assert_eq!(names, expected);
    }
    let stages = bus.payloads();
    let raw = stages.get_stage(received.id(), Stage::WEBHOOK_RAW);
    let raw: Value = raw.await.unwrap()[0].json().unwrap();
    assert_eq!(raw, json!({ "body": "text 1" }));
}

// conformance: omni/nats-kv: the state of a session is kept by key, with a revision
#[tokio::test]
async fn a_session_counts_the_messages_of_its_conversation() {
    for system in System::everywhere().await {
        check_session(system).await;
    }
}

async fn check_session(system: System) {
    let bus = &system.app.bus;
    let kv = bus.kv(sessions::BUCKET).unwrap();
    let mut watch = kv.watch().await.unwrap();
    for n in 1..=3 {
        let message = message(n, "whatsapp", "+49", &Value::Null);
        intake::receive(bus, message).await.unwrap();
    }
    loop {
        let change = tokio::time::timeout(DEADLINE, watch.next()).await;
        let change = change.expect("a change comes").unwrap();
        let session: sessions::Session = serde_json::from_slice(&change.value.unwrap()).unwrap();
        if session.messages == 3 {
            break;
        }
    }
    // A message that comes again changes nothing.
    let first = message(1, "whatsapp", "+49", &Value::Null);
    let noted = sessions::note(Payload(first), State(kv.clone()));
    noted.await.unwrap();
    let session = sessions::find(&kv, &"whatsapp".into(), "c +49")
        .await
        .unwrap();
    assert_eq!(session.unwrap().messages, 3);
    let other = sessions::find(&kv, &"telegram".into(), "c +49")
        .await
        .unwrap();
    assert_eq!(other, None);
}
