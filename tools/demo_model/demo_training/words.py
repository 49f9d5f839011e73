"""The words that generated tasks about tools are made of."""

from __future__ import annotations

from kvd.demo import recall

_VERBS = (
    "get find search create delete send set update list book order play open close start stop add "
    "remove convert translate schedule cancel check count read write move copy rename share show "
    "print save load download upload sort filter merge split lock unlock enable disable pause "
    "resume compute fetch post query record replace report reserve restart run scan sign submit "
    "test track turn view watch buy sell"
)
VERBS = tuple(_VERBS.split())
_NOUNS = (
    "weather flight hotel email message timer alarm file folder user account order invoice ticket "
    "song playlist note reminder event meeting contact photo light door temperature price stock "
    "route taxi table recipe task report document server log database image video page site "
    "comment review product customer payment package delivery device sensor printer camera "
    "calendar project branch commit issue backup snapshot container volume network domain "
    "password key certificate game score team book movie station train"
)
NOUNS = tuple(_NOUNS.split())
_CITIES = (
    "Paris London Berlin Madrid Rome Vienna Prague Warsaw Oslo Stockholm Helsinki Dublin Lisbon "
    "Athens Cairo Nairobi Lagos Tokyo Kyoto Osaka Seoul Beijing Shanghai Delhi Mumbai Bangkok "
    "Hanoi Jakarta Sydney Melbourne Auckland Toronto Montreal Chicago Boston Seattle Denver "
    "Austin Miami Lima Bogota Quito Santiago Havana Munich Hamburg Zurich Geneva Milan"
)
CITIES = tuple(_CITIES.split())
_FIRST_NAMES = (
    "Anna Ben Clara David Emma Felix Grace Hugo Ida Jonas Kate Leo Maria Nils Olga Paul Rosa Sam "
    "Tina Victor Walter Yusuf Zoe Alice Bob Carol Erik Frank Helen Ivan Julia Karl"
)
FIRST_NAMES = tuple(_FIRST_NAMES.split())
_PLAIN = (
    "apple banana bread butter cheese coffee dinner lunch breakfast garden kitchen office school "
    "market library budget plan idea answer question letter number signal result summary draft "
    "version release update status error warning input output value index range label group "
    "section chapter paragraph city street house room floor window morning evening night summer "
    "winter spring autumn monday friday week month year hour minute second paper plastic glass "
    "metal wood stone water fire earth wind cloud rain snow sun moon star music dance paint "
    "travel work study sleep walk drive build learn teach write call meet join leave alpha beta "
    "gamma delta mode speed width height depth weight mass force power energy"
)
WORDS = tuple(dict.fromkeys((*recall.ADJECTIVES, *recall.NOUNS, *_PLAIN.split())))
